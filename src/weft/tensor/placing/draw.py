"""Random ShardTensors: the key of a call, on which ranks agree, and each rank's box drawn with it.

A random call needs no communication, so different seeds on the ranks would go unnoticed:
replicas would drift apart, and blocks would belong to different tensors. So the first random call
on a mesh after each seeding compares seed and number of calls over its ranks, and in debug mode
every call does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Unpack

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.core.layout import Box
from weft.errors import CommunicationError, ShardTypeError
from weft.rng import STREAM, Key, Part, Source, digest_of, samples
from weft.tensor.meta import expanded_dims, intern
from weft.tensor.placing.agreed import check_same
from weft.tensor.placing.arguments import Where, place, shape_of
from weft.tensor.placing.redistribute import redistribute_to
from weft.tensor.placing.refusals import refuse_factory
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.views.inverse import OVERLAP
from weft.tensor.views.moved import written_to
from weft.transport.nodes import untransformed

__all__ = [
    "Sample", "draw_into", "drawn", "next_key", "rand", "randint", "randn", "randperm",
    "torch_draws",
]

Sample = Callable[[Source], torch.Tensor]


class Drawn(Where, total=False):
    """What a random factory takes beside its size."""

    dtype: torch.dtype | None
    generator: torch.Generator | None
    requires_grad: bool


_FROM_A_GENERATOR = (1 << 64) - 1
"""The number of the call, in keys drawn from a user's own generator."""

_CPU = torch.device("cpu")
_MANY = 1 << 16  # more numbers than dtypes of two bytes can hold
_SEED_MASK = (1 << 63) - 1


def next_key(mesh: BoundMesh, generator: torch.Generator | None = None) -> Key:
    """The key of the next random call on a mesh; a rank outside the mesh counts it as well.

    A user's own `generator` gives 63 bits and thereby carries the state; each rank has its own.
    Where ranks have different keys, they raise CommunicationError.
    """
    if generator is None:
        key = STREAM.next_key(_part(mesh))
        known = mesh.cache.get("seeded") is STREAM.token and not mesh.world.debug.on
    else:
        if not isinstance(generator, torch.Generator):
            raise ShardTypeError(
                "generator=", f"{generator!r} is of type {type(generator).__name__}",
                "a generator is a torch.Generator, seeded alike on all ranks",
                [type(generator).__name__], "torch.Generator().manual_seed(0)")
        bits = torch.empty((), dtype=torch.int64, device=generator.device)
        key = int(bits.random_(generator=generator)), _FROM_A_GENERATOR
        known = False
    if not known and mesh.here is not None:
        _agree(mesh, key, generator is not None)
        if generator is None:
            mesh.cache["seeded"] = STREAM.token
    return key


def _part(mesh: BoundMesh) -> Part | None:
    """The part whose calls include those on this mesh; None for a mesh with all ranks.

    Some axes of a mesh, `mesh["tp"]`, are identified by their names, so that all rows of the mesh
    draw the same, on any number of ranks; another mesh is identified by its ranks.
    """
    part = mesh.cache.get("part", False)
    if part is False:
        part = mesh.cache["part"] = _part_of(mesh)
    return part


def _part_of(mesh: BoundMesh) -> Part | None:
    root, axes = mesh.origin or (mesh.abstract, mesh.axis_names)
    ranks = range(root.size()) if root.ranks is None else sorted(root.ranks)
    name = ""
    if len(ranks) < mesh.world.size:
        name = f"ranks {', '.join(map(str, ranks[:8]))}"
        if len(ranks) > 8:
            name += f", ... {ranks[-1]} ({digest_of(str(list(ranks))):x})"
    places = {axis: at for at, axis in enumerate(root.axis_names)}
    joined = not places.keys() >= set(axes)  # axes that torch has flattened to one
    if len(axes) == len(places) or (joined and mesh.size() == root.size()):
        return Part(name, digest_of(name)) if name else None
    kept = ", ".join(map(str, sorted(axes, key=lambda axis: places.get(axis, -1))))
    name = f"axes {kept}" + (f" of {name}" if name else "")
    return Part(name, digest_of(f"{name} of {root!r}"))


def _agree(mesh: BoundMesh, key: Key, is_own: bool) -> None:
    part = None if is_own else _part(mesh)
    seed, number = key if is_own else (STREAM.seed, key[1])
    check_same(
        "a random call", mesh,
        f"seed {seed}, call {number}" + (f" of {part.name}" if part and part.name else ""),
        f"the {mesh.size()} ranks of {mesh.abstract!r} have {{}} different random states",
        "all ranks draw from one global tensor: they have one seed, and make the same "
        "random calls on ShardTensors",
        "generator.manual_seed(0) on all ranks" if is_own else
        "torch.manual_seed(0) on all ranks; where torch's own seeds are to differ, "
        "weft.manual_seed(0) after it", kind=CommunicationError)


@contextmanager
def torch_draws(mesh: BoundMesh) -> Iterator[None]:
    """Inside, torch's own generators draw the same on all ranks, seeded by the next call's key.

    Afterwards they are restored. It counts as a random call only if something was drawn.
    """
    device, generators = mesh.device, [torch.default_generator]
    if device.type not in ("cpu", "meta"):
        generators.append(torch.get_device_module(device).default_generators[device.index])
    before = [generator.get_state() for generator in generators]
    key = STREAM.key(_part(mesh))
    known = STREAM.torch_seed
    seed = int(Source.whole(key, (1,), _CPU).bits64()) & _SEED_MASK
    fresh = [generator.manual_seed(seed).get_state() for generator in generators]
    STREAM.torch_seed = torch.default_generator.initial_seed()
    try:
        yield
    finally:
        after = [generator.get_state() for generator in generators]
        for generator, state in zip(generators, before):
            generator.set_state(state)
        STREAM.torch_seed = known
    if not all(map(torch.equal, fresh, after)):
        next_key(mesh)


def drawn(
    sample: Sample, mesh: BoundMesh, layout: Layout, dtype: torch.dtype,
    generator: torch.Generator | None = None,
) -> ShardTensor:
    """The values that `sample` makes from the bits of one call, for a layout without partial
    axes."""
    key = next_key(mesh, generator)
    if mesh.here is None:
        local = torch.empty(0, dtype=dtype, device=mesh.device)
    else:
        local = sample(Source(key, layout.shape, _box(layout, mesh.here), mesh.device))
    return wrap(local, intern(mesh, layout, dtype, mesh.device, False))


@lru_cache(maxsize=4096)
def _box(layout: Layout, coordinate: tuple[int, ...]) -> Box:
    return layout.box_at(coordinate)


def draw_into(
    tensor: torch.Tensor, sample: Sample, generator: torch.Generator | None = None
) -> None:
    """Write a draw to a ShardTensor, directly into its memory if possible."""
    assert type(tensor) is ShardTensor
    meta, local = tensor._meta, tensor._local
    mesh, layout = meta.mesh, meta.layout.without_partial()
    if meta.strides is not None and expanded_dims(meta):
        raise RuntimeError(OVERLAP)
    if local.is_meta and mesh.device.type != "meta":  # no memory; as in torch no random call
        return
    here = mesh.here
    direct = layout is meta.layout and meta.alias is None and (
        type(local) is torch.Tensor and not torch._C._is_cow_tensor(local)  # type: ignore
        and not (local.requires_grad and torch.is_grad_enabled())
    )
    if here is None or not direct:
        tensor.copy_(drawn(sample, mesh, layout, tensor.dtype, generator))
        return
    out = local.detach()
    source = Source(next_key(mesh, generator), layout.shape, _box(layout, here), mesh.device, out)
    found = sample(source)
    if found is not out:
        out.copy_(found)
    elif not out.numel():
        out.zero_()  # the write counts as on ranks that have elements
    written_to(tensor)


def rand(*size: Any, **options: Unpack[Drawn]) -> ShardTensor:
    """Uniform numbers in [0, 1): `weft.rand(4, 5, mesh=mesh, placements=P("dp"))`.

    The numbers depend only on the seed and the call, not on the mesh or the placements.

    Args:
        size: the global shape, as lengths or as one sequence.
        options: `dtype`, a real or complex one; `requires_grad` of the leaf; `generator`, one with
            the same seed on all ranks (None draws from weft's stream); `mesh` (None: the current
            one) and `placements` (None replicates), also accepted as `device_mesh` and `spec`;
            `layout`, torch's own.

    Raises:
        ShardTypeError: an invalid length; something given by two names.
        UnsupportedOpError: a `layout` that is not dense.
        MeshError: no mesh is given, none is set.
    """
    return _made("weft.rand", torch.rand, size, samples.unit, **options)


def randn(*size: Any, **options: Unpack[Drawn]) -> ShardTensor:
    """Normal numbers with mean 0 and variance 1 (for complex numbers, over both parts).

    Args:
        size: the global shape, as lengths or as one sequence.
        options: as in `rand`.
    """
    return _made("weft.randn", torch.randn, size, samples.normal, **options)


def randint(
    low: int, high: Any = None, size: Sequence[int] | None = None, *,
    dtype: torch.dtype = torch.int64, generator: torch.Generator | None = None,
    requires_grad: bool = False, **where: Unpack[Where],
) -> ShardTensor:
    """Whole numbers in [low, high), or [0, low): torch.randint over a mesh.

    The other arguments, and the errors, are those of `rand`.

    Args:
        low: the smallest number; where it is given alone, the end of the range from 0.
        high: the end of the range, itself excluded.
        size: the global shape; also `randint(high, size)`.
        dtype: the dtype of the result.
    """
    if isinstance(high, (tuple, list)):  # randint(high, size)
        low, high, size = 0, low, high
    elif high is None:
        low, high = 0, low
    if size is None:
        raise ShardTypeError(
            "weft.randint(low, high, size)", "no size is given", "a size is a tuple or a "
            "list of lengths, () of a tensor without dims", [size],
            f"weft.randint({low}, {high}, (4, 5), mesh=mesh)")
    start, stop = low, high
    refuse_factory(torch.randint, start, stop, (1,), dtype=dtype)
    return _laid(
        "weft.randint", shape_of("weft.randint", (size,)),
        lambda source: samples.integers(source, start, stop, dtype), dtype, generator,
        requires_grad, where,
    )


def randperm(
    n: int, *, dtype: torch.dtype = torch.int64, generator: torch.Generator | None = None,
    requires_grad: bool = False, **where: Unpack[Where],
) -> ShardTensor:
    """The numbers from 0 to n - 1 in random order; every rank sorts all of them.

    The other arguments, and the errors, are those of `rand`.

    Args:
        n: how many.
        dtype: one that can hold them.
    """

    def sample(source: Source) -> torch.Tensor:
        whole = Source.whole(source.key, source.shape, source.device)
        (side,) = source.box
        return samples.permutation(whole)[slice(*side)].to(dtype, copy=True)

    refuse_factory(torch.randperm, min(n, _MANY if dtype.itemsize < 4 else 1), dtype=dtype)
    return _laid("weft.randperm", (n,), sample, dtype, generator, requires_grad, where)


def _made(
    call: str, factory: Any, size: tuple[Any, ...],
    sample: Callable[[Source, torch.dtype], torch.Tensor], *, dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None, requires_grad: bool = False,
    **where: Unpack[Where],
) -> ShardTensor:
    shape = shape_of(call, size)
    dtype = dtype or torch.get_default_dtype()
    refuse_factory(factory, (1,), dtype=dtype)
    return _laid(
        call, shape, lambda source: sample(source, dtype), dtype, generator, requires_grad, where)


@untransformed
def _laid(
    call: str, shape: tuple[int, ...], sample: Sample, dtype: torch.dtype,
    generator: torch.Generator | None, requires_grad: bool, where: Where,
) -> ShardTensor:
    bound, layout = place(call, shape, where)
    whole = layout.without_partial()
    made = drawn(sample, bound, whole, dtype, generator)
    made = made if whole is layout else redistribute_to(made, layout)
    return made.requires_grad_() if requires_grad else made
