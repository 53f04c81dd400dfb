"""Batches as ShardTensors; every rank loads only its own part."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from weft.comm import BoundMesh, as_bound_mesh
from weft.core import Layout, P
from weft.core.arguments import MeshLike
from weft.core.mesh import as_mesh
from weft.core.names import PLACEMENTS, also_called
from weft.errors import LayoutError, ShardTypeError
from weft.spmd.mark import mark_sharding
from weft.spmd.mesh import as_spec
from weft.tensor import ShardTensor
from weft.tensor.placing.agreed import check_same
from weft.tensor.placing.from_local import from_local
from weft.tensor.placing.layouts import local_to_sharded
from weft.tensor.placing.redistribute import redistribute_to
from weft.tensor.trace.trees import leaves, map_tensors
from weft.transport.execute import owned

__all__ = ["ShardedLoader", "ShardingSpec"]


@dataclass(frozen=True)
class ShardingSpec:
    """How the tensors of a batch are sharded.

    Args:
        mesh: the mesh; None takes the current or global one.
        partition_spec: see `mark_sharding`; dim 0 counts the samples.
        minibatch: the loader of a rank gives the samples of that rank alone, and the batch is all
            of them, in mesh order of the axes that shard dim 0. Otherwise it gives the whole batch.

    Raises:
        ShardTypeError: not a spec, or not a mesh.
        MeshError: a name of no axis of a given mesh.
        PlacementError: an axis that occurs twice.
    """

    mesh: MeshLike | None
    partition_spec: P | Sequence[Any]
    minibatch: bool = False

    def __post_init__(self) -> None:
        spec = self.spec
        if self.mesh is not None:
            mesh = as_mesh(self.mesh, "ShardingSpec(mesh)")
            Layout.placed(  # raises where they do not fit
                mesh, (mesh.size(),) * len(spec.entries), spec, "ShardingSpec(partition_spec)")

    @property
    def spec(self) -> P:
        """The spec as weft's P."""
        return as_spec(self.partition_spec)

    def bound(self) -> BoundMesh:
        """The mesh on this rank."""
        return as_bound_mesh(self.mesh, "ShardingSpec(mesh)")

    def can_apply(self, t: torch.Tensor) -> bool:
        """Whether the tensor has as many dims as a tuple has entries, as in torch_xla; of a P, at
        least as many. (`apply`, as `mark_sharding`, takes more dims in either case.)"""
        if isinstance(self.partition_spec, P):
            return len(self.spec.entries) <= t.ndim
        return len(self.partition_spec) == t.ndim

    def apply(self, t: torch.Tensor) -> ShardTensor:
        """The tensor, sharded.

        Args:
            t: a plain tensor, equal on all ranks; with `minibatch`, this rank's samples.

        Raises:
            PlacementError: more entries than dims.
            LayoutError: blocks whose other sizes differ.
        """
        as_spec(self.partition_spec, t.ndim)
        return self.applied(t)

    def applied(self, t: torch.Tensor) -> ShardTensor:
        """`apply` for a part of a batch, which may lack dims whose entry is None, as labels do."""
        mesh = self.bound()
        if not self.minibatch:
            return mark_sharding(t, mesh, self.spec)
        rows = P(*self.spec.entries[:1])
        out = from_local(t, mesh, rows, run_check=False, shape=None, stride=None, sizes="infer",
                         sharding_shapes=None, sync=False)
        kept = {0: out.sharding.sizes_of(0)} if rows.entries and rows.entries[0] else None
        layout = Layout(mesh, out.shape, self.spec, sizes=kept)
        return redistribute_to(out, layout, "ShardingSpec.apply")


class ShardedLoader:
    """A DataLoader's batches as ShardTensors.

    From a dataset with indices a rank loads only the samples of its own block. Batches, their order
    and their sizes are those of the loader on one process. The last, smaller batch is sharded like
    every other, so it is ragged or leaves ranks without samples: nothing is dropped, nothing
    padded. All ranks must draw the same order (a sampler seeded alike), which is compared once per
    epoch.

    From an IterableDataset every rank loads everything and keeps its block. With `minibatch=True`
    a rank's loader is its own, whatever its dataset.

    Args:
        dataloader: a torch DataLoader, without a DistributedSampler.
        placements: a ShardingSpec (or P, or torch_xla's tuple) for all tensors; or a map with one
            for each key of a dict batch; or a list with one for each part of a tuple batch.
            None leaves a part as each rank has loaded it.
        mesh: for specs without one; None takes the current or global one.
        device: the device to which blocks go, one batch ahead of their use; None leaves them.

    Raises:
        LayoutError: while iterating, on all ranks: a key or part without a spec, orders or shapes
            that differ between ranks.
    """

    @also_called(device_mesh="mesh", input_sharding="placements", **PLACEMENTS)
    def __init__(
        self, dataloader: DataLoader, placements: Any, *, mesh: MeshLike | None = None,
        device: Any = None,
    ) -> None:
        if not hasattr(dataloader, "batch_sampler"):
            raise ShardTypeError(
                "ShardedLoader(dataloader)", f"it is of type {type(dataloader).__name__}",
                "each rank loads its own samples, as a DataLoader says",
                [type(dataloader).__name__], "torch.utils.data.DataLoader(dataset, batch_size); or "
                "weft.distribute_tensor(batch, mesh, P(...)) for each batch")
        self.dataloader, self.device = dataloader, device
        self.specs = _as_specs(placements, mesh)
        self._local = self._local_loader()

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        for batch, num_rows in _one_ahead(self._batches()):
            yield self._sharded(batch, num_rows)

    # Which samples.

    def _rows(self) -> ShardingSpec | None:
        """The spec by which samples are sharded; None if each rank loads whole batches."""
        specs = leaves(self.specs, ShardingSpec)
        first = specs[0] if specs else None
        if first is None or first.minibatch or isinstance(self.dataloader.dataset, IterableDataset):
            return None
        if self.dataloader.batch_sampler is None:
            return None
        return first if len({(one.bound(), one.spec.entries[:1]) for one in specs}) == 1 else None

    def _local_loader(self) -> tuple[DataLoader, _Blocks] | None:
        rows, whole = self._rows(), self.dataloader
        if rows is None:
            return None
        blocks = _Blocks(whole.batch_sampler, rows)
        more: dict[str, Any] = {}
        if whole.num_workers:
            more = {"prefetch_factor": whole.prefetch_factor,
                    "persistent_workers": whole.persistent_workers}
        return DataLoader(
            whole.dataset, batch_sampler=blocks, num_workers=whole.num_workers,
            collate_fn=whole.collate_fn, pin_memory=whole.pin_memory, timeout=whole.timeout,
            worker_init_fn=whole.worker_init_fn, generator=whole.generator,
            multiprocessing_context=whole.multiprocessing_context, **more,
        ), blocks

    def _batches(self) -> Iterator[tuple[Any, int | None]]:
        """This rank's part of each batch, and the number of samples in the whole batch."""
        if self._local is None:
            for batch in self.dataloader:
                yield self._moved(batch), None
            return
        loader, blocks = self._local
        taken = blocks.begin()
        for place, batch in enumerate(loader):
            num_rows, is_empty = taken[place]
            if is_empty:
                batch = map_tensors(lambda x: x[:0].clone(), batch)
            yield self._moved(batch), num_rows

    def _moved(self, batch: Any) -> Any:
        if self.device is None:
            return batch
        return map_tensors(lambda x: x.to(self.device, non_blocking=True), batch)

    # What they become.

    def _sharded(self, batch: Any, num_rows: int | None) -> Any:
        if num_rows is not None:
            rows = self._rows()
            assert rows is not None
            _check_alike(batch, rows.bound())

        def shard(x: torch.Tensor, spec: ShardingSpec | None) -> Any:
            if spec is None:
                return x
            return spec.applied(x) if num_rows is None else _of_rows(x, spec, num_rows)

        return _with_specs(shard, batch, self.specs)


class _Blocks(Sampler):
    """The indices of one rank's block of every batch."""

    def __init__(self, batches: Any, spec: ShardingSpec) -> None:
        self.batches, self.spec = batches, spec
        self.taken: list[tuple[int, bool]] = []

    def begin(self) -> list[tuple[int, bool]]:
        """The next iteration appends to this list the total number of samples of each batch, and
        whether none of them is this rank's."""
        self.taken = []
        return self.taken

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Any]]:
        mesh, taken = self.spec.bound(), self.taken
        for place, batch in enumerate(self.batches):
            indices = list(batch)
            if place == 0:
                _check_order(indices, mesh)
            start, stop = _box_of_rows(self.spec, mesh, len(indices))
            taken.append((len(indices), start == stop))
            # Without a sample the form of a batch is unknown: load one, and drop it.
            yield indices[start:stop] or indices[:1]


def _box_of_rows(spec: ShardingSpec, mesh: BoundMesh, num_rows: int) -> tuple[int, int]:
    if mesh.here is None:
        return 0, 0
    return Layout(mesh, (num_rows,), P(*spec.spec.entries[:1])).box_at(mesh.here)[0]


def _of_rows(x: torch.Tensor, spec: ShardingSpec, num_rows: int) -> ShardTensor:
    """The ShardTensor that has this rank's samples `x`; the other dims are whole."""
    mesh = spec.bound()
    layout = Layout(mesh, (num_rows, *x.shape[1:]), spec.spec)
    if mesh.here is None:
        return local_to_sharded(x.new_empty(0), mesh, layout)
    inner = tuple(slice(*interval) for interval in layout.box_at(mesh.here)[1:])
    return local_to_sharded(owned(x[(slice(None), *inner)].contiguous()), mesh, layout)


def _check_order(indices: list[Any], mesh: BoundMesh) -> None:
    """Raise on all ranks if they draw different samples."""
    check_same(
        "ShardedLoader", mesh, f"{zlib.crc32(repr(indices).encode()):08x}",
        "the ranks draw {} different first batches",
        "all ranks draw one order of samples, and each loads its block of every batch",
        "DataLoader(..., generator=torch.Generator().manual_seed(epoch)) on all ranks, "
        "no DistributedSampler; or ShardingSpec(..., minibatch=True)")


def _check_alike(batch: Any, mesh: BoundMesh) -> None:
    """Raise on all ranks if their samples have different shapes or dtypes."""
    mine = [(tuple(x.shape[1:]), str(x.dtype)) for x in leaves(batch, torch.Tensor)]
    check_same(
        "ShardedLoader", mesh, str(mine), "samples have other shapes or dtypes on other ranks",
        "the blocks of a batch differ in the number of samples alone",
        "pad to one length in the dataset, not in collate_fn")


def _one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """The same, each fetched (and sent to the device) before the previous one is used."""
    held: list[Any] = []
    for batch in batches:
        held.append(batch)
        if len(held) > 1:
            yield held.pop(0)
    yield from held


def _as_specs(spec: Any, mesh: Any) -> Any:
    if spec is None or isinstance(spec, ShardingSpec):
        return spec
    if isinstance(spec, (P, tuple)):
        return ShardingSpec(mesh, spec)
    if isinstance(spec, Mapping):
        return {key: _as_specs(one, mesh) for key, one in spec.items()}
    if isinstance(spec, list):
        return [_as_specs(one, mesh) for one in spec]
    raise ShardTypeError(
        "ShardedLoader(placements=)", f"{spec!r} is a {type(spec).__name__}",
        "a spec is a ShardingSpec, a P, a tuple of entries, a map from keys or a list",
        [repr(spec)], 'ShardedLoader(loader, P("dp"), mesh=mesh)')


def _with_specs(shard: Any, batch: Any, specs: Any) -> Any:
    """`shard(tensor, spec)` for the tensors of a batch, by key or position if specs are."""
    if isinstance(specs, dict):
        keys = list(batch) if isinstance(batch, Mapping) else []
        lacking = [key for key in keys if key not in specs]
        unused = [key for key in specs if key not in keys]
        if lacking or unused:
            raise LayoutError(
                "ShardedLoader(placements=)", f"the batch has the keys {keys}, the specs "
                f"{list(specs)}", "every key of a batch has a spec, which may be None",
                [*(f"no spec for {key!r}" for key in lacking),
                 *(f"no {key!r} in the batch" for key in unused)],
                f"{{{', '.join(f'{key!r}: ...' for key in keys)}}}")
        return {key: _with_specs(shard, batch[key], specs[key]) for key in batch}
    if isinstance(specs, list):
        if not isinstance(batch, (list, tuple)) or len(batch) != len(specs):
            size = len(batch) if isinstance(batch, (list, tuple)) else type(batch).__name__
            raise LayoutError(
                "ShardedLoader(placements=)", f"the batch has {size} parts, and there are "
                f"{len(specs)} specs", "a list has a spec for each part of a tuple batch",
                [f"{len(specs)} specs"], "[P('dp'), P('dp')]")
        return type(batch)(
            [_with_specs(shard, one, spec) for one, spec in zip(batch, specs)]
        )
    return map_tensors(lambda x: shard(x, specs), batch)
