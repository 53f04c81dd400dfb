"""Attention over a sharded sequence: values, gradients, layouts, bytes and memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.harness import check_op, held, local_part
from tests.live_bytes import LiveBytes
from weft import P, ShardTensor
from weft.core import Layout, Mesh
from weft.ops.attending import fused, sequence, ways

sdpa: Any = F.scaled_dot_product_attention
ON_SEQUENCE = P(None, None, "x")


@pytest.fixture(params=["heads", "blocks", "tiles"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """By which way attention goes, where there is a choice: an exchange of heads; parts of blocks
    by torch's kernel; whole blocks without it."""
    by_heads = request.param == "heads"
    monkeypatch.setattr(ways.Attention, "_by_heads", lambda *_: by_heads)
    if request.param == "blocks":
        monkeypatch.setattr(sequence, "BUFFER_NBYTES", 1)
    if request.param == "tiles":
        monkeypatch.setattr(fused, "serves", lambda *_: False)
    return request.param


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True, enable_gqa=q.shape[-3] != k.shape[-3])


def plain(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
    return sdpa(q, k, v, *mask, enable_gqa=q.shape[-3] != k.shape[-3])


def operands(
    heads: int = 4, key_heads: int | None = None, length: int = 10, keys: int | None = None,
    width: int = 4, dtype: torch.dtype = torch.float64, batch: int = 2,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    key_heads, keys = key_heads or heads, length if keys is None else keys
    return [normal(batch, heads, length, 4), normal(batch, key_heads, keys, 4),
            normal(batch, key_heads, keys, width)]


def check(
    fn: Callable[..., Tensor], tensors: list[Tensor], mesh: dict[str, int], *specs: Any,
    sizes: tuple[Any, ...] = (),
) -> list[Any]:
    """Compare every rank's part and gradients with those of one process."""
    layouts = [
        None if spec is None else Layout(Mesh(mesh), tuple(one.shape), spec,
                                         sizes={2: cut} if cut else None)
        for one, spec, cut in itertools.zip_longest(tensors, specs, sizes)
    ]
    return check_op(fn, tensors, mesh, layouts)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("heads, key_heads", [(1, 1), (3, 3), (8, 2), (6, 1)])
def test_a_sharded_sequence_stays_sharded(
    heads: int, key_heads: int, ranks: int, way: str
) -> None:
    for fn, length, keys in ((causal, 10, 10), (plain, 10, 10), (causal, 9, 13), (plain, 13, 9)):
        tensors = operands(heads, key_heads, length, keys)
        outcomes = check(fn, tensors, {"x": ranks}, *[ON_SEQUENCE] * 3)
        assert outcomes[0].results[0].layout.spec == ON_SEQUENCE


@pytest.mark.parametrize("cuts", [((7, 0, 3), (0, 2, 8)), ((10, 0, 0), (0, 0, 10)),
                                  ((1, 8, 1), (1, 8, 1))])
@pytest.mark.parametrize("fn", [causal, plain])
def test_ragged_and_empty_shards(fn: Any, cuts: Any, way: str) -> None:
    queries, keys = cuts
    for heads in (1, 3):
        check(fn, operands(heads), {"x": 3}, *[ON_SEQUENCE] * 3, sizes=(queries, keys, keys))
        check(fn, operands(heads), {"x": 3}, *[ON_SEQUENCE] * 3, sizes=(queries, keys, queries))


MASKS: dict[str, tuple[Callable[[], Tensor], list[Any]]] = {
    "window": (lambda: torch.ones(10, 10).tril().triu(-3).bool(),
               [P(), P("x"), P(None, "x"), None]),
    "hidden rows": (lambda: torch.rand(2, 4, 10, 10) > 0.8, [P(), ON_SEQUENCE, P(None, "x")]),
    "padding": (lambda: torch.arange(20).view(2, 1, 1, 10) % 10 < 7,
                [P(), P(None, None, None, "x")]),
    "added": (lambda: torch.randn(4, 10, 10).double(), [P(), P(None, "x"), P("x")]),
    "added to keys": (lambda: torch.randn(2, 1, 1, 10).double(), [P(), P(None, None, None, "x")]),
    "infinite": (lambda: torch.randn(10, 10).double().masked_fill(torch.rand(10, 10) > 0.3,
                                                                  -torch.inf), [P("x"), None]),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_masks(name: str, key_heads: int, way: str) -> None:
    """Boolean ones and added ones, which have gradients; rows that see nothing are zero."""
    torch.manual_seed(1)
    make, specs = MASKS[name]
    mask = make()
    for spec, of_queries in itertools.product(specs, (ON_SEQUENCE, P())):
        check(plain, [*operands(4, key_heads), mask], {"x": 2}, of_queries, ON_SEQUENCE,
              ON_SEQUENCE, spec)


@pytest.mark.parametrize("keys", [P("y", None, "x"), P(None, "y", "x"), P(None, None, ("x", "y")),
                                  P(None, None, ("y", "x")), P(None, None, "y")], ids=str)
def test_two_axes(keys: P, way: str) -> None:
    """Grouped causal attention, and that of fewer keys: in turn, by heads the other way round."""
    for at, queries in enumerate((
        P("y", None, "x"), P(None, "y", "x"), P(None, None, ("x", "y")),
        P(None, None, ("y", "x")), P(None, None, "x"), P(),
    )):
        if (at % 2 == 0) != (way == "heads"):
            check(causal, operands(4, 2, 9), {"x": 2, "y": 2}, queries, keys, keys)
        else:
            check(plain, operands(length=9, keys=7), {"x": 2, "y": 2}, queries, keys, keys)


@pytest.mark.parametrize("heads, key_heads", [(8, 2), (12, 3)])
@pytest.mark.parametrize("fn", [causal, plain])
def test_more_shards_of_heads_than_heads_of_keys(fn: Any, heads: int, key_heads: int) -> None:
    """Each rank has queries, and the keys that they share."""
    by_heads = P(None, "x")
    for keys in (by_heads, P()):
        (outcome, *_) = check(fn, operands(heads, key_heads), {"x": 4}, by_heads, keys, keys)
        assert 0 not in outcome.results[0].layout.sizes_of(1)
    for keys in (P(None, "x", "y"), P(None, None, "y"), P()):
        check(fn, operands(heads, key_heads), {"x": 4, "y": 2}, P(None, "x", "y"), keys, keys)
    mask = torch.arange(2 * heads * 100).view(2, heads, 10, 10) % 3 < 2
    specs = [by_heads] * 4
    check(plain, [*operands(heads, key_heads), mask], {"x": 4}, *specs)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("length", [1, 5])
def test_whole_queries_over_sharded_keys(ranks: int, length: int) -> None:
    for tensors in (operands(length=length, keys=10), operands(8, 2, length, 10)):
        for fn in (plain, causal):
            check(fn, tensors, {"x": ranks}, P(), ON_SEQUENCE, ON_SEQUENCE)
        check(plain, tensors, {"x": ranks}, P(), ON_SEQUENCE, ON_SEQUENCE,
              sizes=(None, (0,) * (ranks - 1) + (10,), (0,) * (ranks - 1) + (10,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_floats(dtype: torch.dtype, way: str) -> None:
    """Half precision is added up in float32: it is off by no more than torch's own and a rounding
    of gradients that travel. In float32 as many sums are as far off again."""
    tensors = operands(4, 2, 40, dtype=dtype)
    exact = _results(causal, [one.double() for one in tensors])
    own = _results(causal, tensors)

    def on_rank(mesh: Any) -> list[Tensor]:
        layouts = [Layout(mesh, tuple(one.shape), ON_SEQUENCE) for one in tensors]
        sharded = [ShardTensor.from_local(local_part(layout, one, mesh.here, 0), mesh, layout)
                   for one, layout in zip(tensors, layouts)]
        return [held(one).full for one in _results(causal, sharded)]

    for rank in weft.testing.run(on_rank, 4, {"x": 4}):
        for mine, torchs, due in zip(rank, own, exact):
            assert mine.dtype is dtype
            rounding = torch.finfo(dtype).eps * due.abs().max()
            times = 2 if dtype is torch.float32 else 1
            allowed = times * ((torchs.double() - due).abs().max() + rounding)
            assert (mine.double() - due).abs().max() <= allowed


def _results(fn: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The result and the gradients."""
    tensors = [one.detach().requires_grad_() for one in tensors]
    out = fn(*tensors)
    (out * out).sum().backward()
    return [out.detach(), *[one.grad for one in tensors]]  # type: ignore[list-item]


@pytest.mark.parametrize("specs", [(ON_SEQUENCE, ON_SEQUENCE), (P(), ON_SEQUENCE),
                                   (ON_SEQUENCE, P())])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_second_derivatives(specs: Any, key_heads: int, way: str) -> None:
    tensors, layouts = operands(4, key_heads, 6), (specs[0], specs[1], specs[1])
    check(_second(causal), tensors, {"x": 2}, *layouts)
    for at, shape in enumerate(((6, 6), (2, 1, 1, 6), (4, 6, 6))):
        mask = torch.linspace(-1, 1, 144, dtype=torch.float64)[: torch.Size(shape).numel()]
        # Each layout with one number of heads of keys.
        spec = P() if at % 2 == (key_heads == 2) else P(*[None] * (len(shape) - 1), "x")
        check(_second(plain), [*tensors, mask.view(shape)], {"x": 2}, *layouts, spec)


def _second(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def second(*tensors: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = fn(*tensors)
            given = [one for one in tensors if one.requires_grad]
            if not given:  # the value alone is asked for
                return out.sum()
            found = torch.autograd.grad((out * out).sum(), given, create_graph=True)
            total: Any = sum([(one * one).sum() for one in found])
            return total

    return second


@pytest.mark.parametrize("dim", [1, 2])
def test_queries_of_fewer_dims_on_ranks_that_would_have_none(dim: int) -> None:
    """Without queries torch's result has the shape of the query, not that of a broadcast."""
    q, k, v = operands(4, length=3, keys=6, width=3, batch=4)
    axis = P(*[None] * (dim + 1), "x")
    for specs in ((P(*[None] * dim, "x"), P(None, "x"), P()), (P(), P(), axis),
                  (P(*[None] * dim, "x"), axis, axis)):
        layouts = [Layout(Mesh({"x": 5}), tuple(one.shape), spec)
                   for one, spec in zip((q[0], k, v), specs)]
        check_op(sdpa, [q[0], k, v], {"x": 5}, layouts)


def test_operands_of_fewer_dims() -> None:
    """Keys without a batch, and a mask of the keys alone."""
    q, k, v = operands(3, length=10)
    for specs in ((P(None, "x"), P("x")), (P(), P("x")), (P(None, "x"), P())):
        layouts = [Layout(Mesh({"x": 2}), tuple(one.shape), spec)
                   for one, spec in zip((q[0], k[0, 0], v[0, 0]), (specs[0], *[specs[1]] * 2))]
        check_op(lambda *tensors: sdpa(*tensors), [q[0], k[0, 0], v[0, 0]], {"x": 2}, layouts)


def test_heads_of_values_in_groups_of_their_own() -> None:
    q, k, _ = operands(8, 4)
    check(plain, [q, k, operands(8, 2)[2]], {"x": 2}, *[ON_SEQUENCE] * 3)


# What is sent.


def received(
    fn: Callable[..., Tensor], tensors: list[Tensor], mesh: dict[str, int], *specs: P,
    grad: bool = True,
) -> list[tuple[int, int]]:
    """Per rank, the bytes that it receives, forward and backward."""
    def on_rank(on: Any) -> tuple[int, int]:
        sharded = [
            ShardTensor.from_local(local_part(layout, one, on.here, 0), on, layout)
            for one, spec in zip(tensors, specs)
            for layout in [Layout(on, tuple(one.shape), spec)]
        ]
        sharded = [one.requires_grad_(grad) for one in sharded]
        with weft.explain() as log:
            out = fn(*sharded)
            if grad:
                out.backward(torch.ones_like(out))
        totals = {"forward": 0, "backward": 0}
        for event in log.events:
            totals[event.direction] += event.nbytes
        return totals["forward"], totals["backward"]

    return weft.testing.run(on_rank, Mesh(mesh).size(), mesh)


def test_blocks_move_once_and_none_that_nobody_sees() -> None:
    """A block has 3 positions of 4 and 4 numbers for each of 2 samples: 384 bytes."""
    tensors = operands(1, length=12)
    specs = [ON_SEQUENCE] * 3
    block = 2 * 3 * (4 + 4) * 8
    assert received(plain, tensors, {"x": 4}, *specs) == [(3 * block, 6 * block)] * 4
    assert received(causal, tensors, {"x": 4}, *specs) == [
        (rank * block, rank * block + (3 - rank) * block) for rank in range(4)
    ]


def test_heads_move_where_that_is_less() -> None:
    """Of queries, keys, values and result, three quarters of a rank's quarter."""
    tensors = operands(4, length=16, width=4)
    share = 2 * 4 * 16 * 4 * 8 // 16 * 3
    specs = [ON_SEQUENCE] * 3
    assert received(plain, tensors, {"x": 4}, *specs) == [(4 * share, 4 * share)] * 4


def test_a_mask_of_each_head_does_not_move() -> None:
    """A part of its rows is as large as a head of it, but is not the same: blocks move instead."""
    tensors = operands(4, length=64, width=4)
    mask = torch.linspace(-1, 1, 4 * 64 * 64, dtype=torch.float64).view(1, 4, 64, 64)
    block = 2 * 4 * 16 * (4 + 4) * 8
    specs = [ON_SEQUENCE] * 4
    found = received(plain, [*tensors, mask], {"x": 4}, *specs)
    assert found == [(3 * block, 6 * block)] * 4


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("spec", [P(None, None, "x"), P(None, None, None, "x")], ids=str)
def test_the_mask_of_several_layers_moves_once(spec: P, grad: bool, way: str) -> None:
    """In every step, and again after a write to it, also through its `.data`."""
    tensors = operands(4, length=16)
    mask = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0)) > 0.5
    mask |= torch.eye(16).bool()

    def on_rank(on: Any) -> list[int]:
        given = [
            weft.distribute_tensor(one, on, ON_SEQUENCE, src_data_rank=None).requires_grad_(grad)
            for one in tensors]
        there = weft.distribute_tensor(mask.clone(), on, spec, src_data_rank=None)
        moved = []
        for step in range(4):
            due = mask if step < 2 else mask.mT if step == 2 else mask
            if step == 2:
                there.copy_(mask.mT)
            elif step == 3:
                there.data.copy_(mask)
            layers = []
            with weft.explain() as log:
                for _ in range(3):
                    out = plain(*given, there)
                    layers.append(sum(one.nbytes for one in log.events if "dot" in one.op))
                    assert torch.allclose(out.full_tensor(), plain(*tensors, due))
            moved += [layers[0], layers[1] - layers[0], layers[2] - layers[1]]
            if grad:
                out.sum().backward()
        assert len(set(moved[1::3] + moved[2::3])) == 1 and moved[0] == moved[6] == moved[9]
        return [moved[0] - moved[1], moved[3] - moved[4]]

    found = weft.testing.run(on_rank, mesh={"x": 2})
    rows, whole = 2 * 8 * 8, 2 * 16 * 16 // 2
    first = whole if way == "heads" else 0
    if spec == P(None, None, None, "x"):  # rows first, which a backward forgets
        assert found == [[first + rows, first + rows if grad else 0]] * 2
    else:
        assert found == [[first, 0]] * 2


@pytest.mark.parametrize("keys", [8, 4096])
def test_a_token_of_decoding_moves_no_keys(keys: int) -> None:
    """Of each head, the largest score, the sum and 4 numbers, to all of 4 ranks and back."""
    tensors = operands(4, 2, 1, keys, width=4, batch=1)
    found = received(plain, tensors, {"x": 4}, P(), ON_SEQUENCE, ON_SEQUENCE, grad=False)
    assert found == [(4 * (1 + 1 + 4) * 8 * 2 * 3 // 4, 0)] * 4


def test_a_token_that_one_rank_has_goes_to_the_keys() -> None:
    """As logits[:, -1:] leaves it; the cache grows on the last rank."""
    tensors = operands(4, 2, 1, 64, width=4, batch=1)
    specs = [ON_SEQUENCE] * 3
    found = received(plain, tensors, {"x": 4}, *specs, grad=False)
    of_query, of_summaries = 4 * 4 * 8, 4 * (1 + 1 + 4) * 8 * 2 * 3 // 4
    assert max(found) == (of_query + of_summaries, 0)
    check(plain, tensors, {"x": 4}, *specs)


# What a rank holds.


@pytest.mark.parametrize("heads, key_heads, share", [(1, 1, 1.5), (8, 2, 1.25), (4, 4, 1.75)])
def test_peak_of_a_rank(heads: int, key_heads: int, share: float) -> None:
    """At 4,096 positions on 4 ranks, in parts of 4 of what one process holds. Where heads are
    exchanged, the operands, which are held here, live beside what they become."""
    shapes = [(1, heads, 4096, 64), *[(1, key_heads, 4096, 64)] * 2]

    def peak(tensors: Sequence[Tensor]) -> int:
        with LiveBytes() as live:
            _results(causal, tensors)
        return live.peak

    def on_rank(mesh: Any) -> int:
        layouts = [Layout(mesh, shape, ON_SEQUENCE) for shape in shapes]
        return peak([ShardTensor.from_local(torch.ones(layout.local_shape_at(mesh.here)), mesh,
                                            layout) for layout in layouts])

    one = peak([torch.ones(shape) for shape in shapes])
    assert max(weft.testing.run(on_rank, 4, {"x": 4})) <= share / 4 * one


# Bad input.


BAD: dict[str, tuple[Sequence[tuple[int, ...]], dict[str, Any]]] = {
    "a mask of too few keys": ([(2, 4, 8, 4)] * 3 + [(8, 5)], {}),
    "a mask of other heads": ([(2, 4, 8, 4)] * 3 + [(3, 8, 8)], {}),
    "heads that do not group": ([(2, 6, 8, 4), (2, 4, 8, 4), (2, 4, 8, 4)], {"enable_gqa": True}),
    "fewer heads, not grouped": ([(2, 8, 8, 4), (2, 2, 8, 4), (2, 2, 8, 4)], {}),
    "other features": ([(2, 4, 8, 4), (2, 4, 8, 5), (2, 4, 8, 4)], {}),
    "other samples": ([(2, 4, 8, 4), (3, 4, 8, 4), (3, 4, 8, 4)], {"is_causal": True}),
}


@pytest.mark.parametrize("name", BAD)
def test_torchs_own_error_before_anything_is_sent(name: str) -> None:
    shapes, options = BAD[name]
    tensors = [torch.ones(shape) for shape in shapes]
    with pytest.raises(RuntimeError) as due:
        sdpa(*tensors, **options)

    def on_rank(mesh: Any) -> None:
        given = [weft.distribute_tensor(one, mesh, P(*[None] * (one.dim() - 2), "x"))
                 for one in tensors]
        with weft.explain() as log, pytest.raises(RuntimeError) as found:
            sdpa(*given, **options)
        assert str(due.value) in str(found.value) and log.events == []

    weft.testing.run(on_rank, 2, {"x": 2})


def test_queries_and_keys_on_different_meshes() -> None:
    def on_rank(mesh: Any) -> None:
        query, key = [
            weft.distribute_tensor(torch.ones(2, 8, 4), mesh[axis], P(None, axis)) for axis in "xy"]
        with pytest.raises(weft.MeshError, match="all operands of one call live on one mesh"):
            sdpa(query, key, key)

    weft.testing.run(on_rank, 4, {"x": 2, "y": 2})
