"""What local tensors make up: by default cuts, by sizes that are told; faults are all ranks'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.harness import ranks
from weft import LayoutError, P, Partial, Replicate, Shard, ShardTensor, WeftError
from weft.core import Layout, Mesh

MESHES: list[dict[str, int]] = [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}]


def numbers(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def block(mesh: Any, whole: Tensor, spec: Any, sizes: Any = None) -> Tensor:
    box = Layout(mesh, whole.shape, spec, sizes=sizes).box(mesh.rank)
    return whole[tuple(slice(*side) for side in box)].clone()


@pytest.mark.parametrize("rows", range(9))
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_chunks_of_any_length(axes: dict[str, int], rows: int) -> None:
    def on_rank(mesh: Any) -> None:
        whole = numbers(rows, 5)
        for spec in (P("x"), P(tuple(axes)), P(None, "x"), P("x", tuple(axes)[1:])):
            x = ShardTensor.from_local(block(mesh, whole, spec), mesh, spec, sizes="chunk")
            assert x.sharding == Layout(mesh, whole.shape, spec)
            assert torch.equal(x.full_tensor(), whole)
            if rows:
                assert x.mean().item() == whole.mean().item()

    weft.testing.run(on_rank, mesh=axes)


@pytest.mark.parametrize("sizes", ["chunk", "infer", {0: (4, 3)}], ids=str)
@ranks(x=2)
def test_chunks_of_a_region(mesh: Any, sizes: Any) -> None:
    x = weft.distribute_tensor(numbers(7, 2), mesh, P("x"))
    y = weft.local_map(
        lambda a: a * 2, in_specs=P("x"), out_specs=P("x"), mesh=mesh, sizes=sizes)(x)
    assert y.shape == (7, 2) and y.mean().item() == 13.0
    assert torch.equal(y.full_tensor(), numbers(7, 2) * 2)


@ranks(x=4)
def test_strides_are_those_that_the_blocks_show(mesh: Any) -> None:
    for whole in (numbers(7, 4, 3, 2).to(memory_format=torch.channels_last), numbers(4, 7).t()):
        for sizes in ("infer", "chunk"):
            local = block(mesh, whole, P("x"))
            x = ShardTensor.from_local(local, mesh, P("x"), sizes=sizes)
            assert x.stride() == whole.stride()
            assert x.to_local().data_ptr() == local.data_ptr()  # of one row, too
            assert torch.equal(x.full_tensor(), whole)
    spread = torch.ones(3, 1).expand(3, 4)
    assert ShardTensor.from_local(spread, mesh, P("x")).stride() == (4, 1)


def lists(mesh: Any) -> Any:
    return [1.0, 2.0] if mesh.rank == 1 else torch.ones(2)


def odd(mesh: Any, usual: Any, other: Any) -> Any:
    return other if mesh.rank == 1 else usual


def map_of(locals_: Any) -> Any:
    """A region of which rank 1 returns something else."""
    return lambda mesh: weft.local_map(
        lambda x: locals_(mesh), in_specs=P(), out_specs=P("x"), mesh=mesh)(torch.ones(2))


FAULTS: dict[str, tuple[Any, str]] = {
    "no default cuts": (
        lambda m: ShardTensor.from_local(torch.ones(m.rank + 2), m, P("x"), sizes="chunk"),
        'from_local(sizes="chunk"): 1 dims of shape (9,) are sharded in another way.\n'
        "  Rule: blocks are those of torch.chunk, axis by axis.\n"
        "  Offenders: dim 0: (2, 3, 4), not (3, 3, 3)\n"
        '  Fix: sizes="infer", which takes them as they are'),
    "dtype": (
        lambda m: ShardTensor.from_local(
            torch.ones(2, dtype=odd(m, torch.float32, torch.float64)), m, P("x")),
        'from_local(sizes="infer"): 1 facts of the local tensors differ between 3 ranks.\n'
        "  Rule: the blocks of one tensor have one dtype and one order in memory, and all of them "
        "or none require a gradient.\n"
        "  Offenders: rank 1: torch.float64, rank 0: torch.float32\n"
        "  Fix: local.to(dtype), local.contiguous() or local.requires_grad_() on these ranks"),
    "gradient": (
        lambda m: ShardTensor.from_local(
            torch.ones(2, requires_grad=m.rank == 1), m, P("x"), sizes="chunk"),
        "rank 1: requires_grad=True, rank 0: False"),
    "order": (
        lambda m: ShardTensor.from_local(
            odd(m, torch.ones(2, 3), torch.ones(3, 2).t()), m, P("x")),
        "rank 1: strides (1, 2) of shape (2, 3), rank 0: (3, 1) of (2, 3)"),
    "no tensor": (
        lambda m: ShardTensor.from_local(lists(m), m, P("x")),
        "rank 1: from_local(local_tensor): it is of type list"),
    "a sparse one": (
        lambda m: ShardTensor.from_local(
            odd(m, torch.ones(2), torch.ones(2).to_sparse()), m, [Shard(0)]),
        "rank 1: from_local(local_tensor): it is torch.float32 of torch.sparse_coo"),
    "too few dims": (
        lambda m: ShardTensor.from_local(
            odd(m, torch.ones(2, 2), torch.ones(2)), m, P(None, "x")), "rank 1: "),
    "other dims": (
        lambda m: ShardTensor.from_local(odd(m, torch.ones(2, 2), torch.ones(2)), m, P("x")),
        "rank 1: 1 dims"),
    "other placements": (
        lambda m: ShardTensor.from_local(torch.ones(2, 2), m, odd(m, P("x"), P(None, "x"))),
        "rank 1: other placements than rank 0"),
    "of a region": (
        map_of(lambda m: torch.ones(2, dtype=odd(m, torch.int64, torch.int32))),
        "rank 1: torch.int32, rank 0: torch.int64"),
    "no tensor, checked": (
        lambda m: ShardTensor.from_local(lists(m), m, P(), run_check=True),
        "rank 1: from_local(local_tensor): it is of type list"),
    "gradient, checked": (
        lambda m: ShardTensor.from_local(
            torch.ones(2, requires_grad=m.rank == 1), m, [Partial()], run_check=True),
        "rank 1: requires_grad=True, rank 0: False"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_is_told_to_all(fault: str) -> None:
    call, due = FAULTS[fault]

    def on_rank(mesh: Any) -> str:
        with pytest.raises(WeftError) as caught:
            call(mesh)
        assert ShardTensor.from_local(torch.ones(2), mesh, P("x")).sum().item() == 6  # in step
        return str(caught.value)

    said = weft.testing.run(on_rank, mesh={"x": 3})
    assert said[0] == said[2] and due in said[0], said[0]
    if fault in ("no tensor", "no tensor, checked", "a sparse one", "too few dims"):
        assert said[1].splitlines()[0].startswith(due.removeprefix("rank 1: "))  # in full
    else:
        assert said[1].splitlines()[1:] == said[0].splitlines()[1:]


ROWS = (3, 0, 2)
SHAPES = [(3, 6), (0, 6), (2, 6)]
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a dim is missing": ({"sizes": {}}, "dim 0, in 3 shards"),
    "of another dim": ({"sizes": {1: (6,)}}, "dim 0, in 3 shards"),
    "a dim that is none": ({"sizes": {0: ROWS, 5: (1,)}}, "dim 5 of a tensor of 2 dims"),
    "too few": ({"sizes": {0: (3, 0)}}, "dim 0: "),
    "negative": ({"sizes": {0: (3, -1, 2)}}, "dim 0: "),
    "no numbers": ({"sizes": {0: ("3", 0, 2)}}, "'3' (str)"),
    "a number": ({"sizes": {0: 3}}, "sizes={0: ...}): 3, of type int, is no sequence"),
    "a word": ({"sizes": {0: "flat"}}, "dim 0: 'flat', of no known length"),
    "another sum": ({"sizes": {0: ROWS}, "shape": (6, 6)}, "dim 0: "),
    "a list": ({"sizes": [3, 0, 2]}, "sizes is [3, 0, 2]"),
    "nothing": ({"sizes": None}, "sizes is None"),
    "no shapes": ({"sharding_shapes": {}}, "no shapes along 'x', which shards dim 0"),
    "an axis that is none": ({"sharding_shapes": {"z": SHAPES}}, "'z'"),
    "shapes as a list": ({"sharding_shapes": SHAPES}, "it is of type list"),
    "too few shapes": ({"sharding_shapes": {0: SHAPES[:2]}}, "0: [(3, 6), (0, 6)]"),
    "shapes of other dims": ({"sharding_shapes": {0: [(3, 6), (0,), (2, 6)]}},
                             "0: [(3, 6), (0,), (2, 6)]"),
    "a shape that is none": ({"sharding_shapes": {0: [(3, 6), None, (2, 6)]}}, "0: [(3, 6), None,"),
    "columns of one": ({"sharding_shapes": {0: [(3, 6), (0, 6), (2, 7)]}},
                       "0: [(3, 6), (0, 6), (2, 7)]"),
    "twice": ({"sharding_shapes": {0: SHAPES, "x": SHAPES}}, "'x': the axis is given twice"),
    "both": ({"sizes": {0: (2, 1, 2)}, "sharding_shapes": {0: SHAPES}},
             "dim 0: sizes (2, 1, 2), sharding_shapes (3, 0, 2)"),
    "both, and one no sizes": ({"sizes": {0: 5}, "sharding_shapes": {0: SHAPES}},
                               "dim 0: sizes 5, sharding_shapes (3, 0, 2)"),
    "another shape": ({"sharding_shapes": {0: SHAPES}, "shape": (6, 6)}, "dim 0: "),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_said_and_cannot_be(fault: str) -> None:
    """It fits some ranks, and is refused by all of them: nobody is asked."""
    options, due = WRONG[fault]

    def on_rank(mesh: Any) -> str:
        local = torch.ones(ROWS[mesh.rank], 6)
        with pytest.raises(WeftError) as caught:
            ShardTensor.from_local(local, mesh, [Shard(0)], **options)
        return str(caught.value)

    said = weft.testing.run(on_rank, mesh={"x": 3})
    assert said == [said[0]] * 3 and due in said[0], said[0]
    assert [line.strip().split(":")[0] for line in said[0].splitlines()[1:4]] == [
        "Rule", "Offenders", "Fix"]


@ranks(x=2, y=2)
def test_shapes_along_two_axes(mesh: Any) -> None:
    whole = numbers(7, 5)
    local = block(mesh, whole, P("x", "y"), {0: (5, 2)})
    mine = tuple(local.shape)
    shapes = {0: [(5, mine[1]), (2, mine[1])], "y": [(mine[0], 3), (mine[0], 2)]}
    x = ShardTensor.from_local(local, mesh, [Shard(0), Shard(1)], sharding_shapes=shapes)
    assert torch.equal(x.full_tensor(), whole)
    y = ShardTensor.from_local(
        whole, mesh, [Replicate(), Replicate()], sharding_shapes={0: [(7, 5)] * 2})
    assert y.shape == (7, 5)
    with pytest.raises(LayoutError, match="dim 0 is sharded over 2 axes, and needs sizes="):
        ShardTensor.from_local(
            torch.ones(2), mesh, P(("x", "y")), sharding_shapes={0: [(2,)] * 2, 1: [(2,)] * 2})


def test_a_block_that_contradicts_is_told_to_all_where_ranks_are_compared() -> None:
    def on_rank(mesh: Any) -> str:
        local = torch.ones(odd(mesh, 2, 3), 2)
        with pytest.raises(LayoutError) as caught:
            ShardTensor.from_local(local, mesh, P("x"), sizes={0: (2, 2, 2)}, run_check=True)
        return str(caught.value)

    said = weft.testing.run(on_rank, mesh={"x": 3})
    assert said == [said[0]] * 3 and "rank 1: shape (3, 2) for (2, 2)" in said[0]


def test_no_rank_is_asked_for_what_is_told() -> None:
    """One of three ranks alone goes on: sizes, a global shape, and what nothing cuts."""
    def on_rank(mesh: Any) -> bool:
        if mesh.rank != 1:
            return True
        local, layout = torch.ones(2, 2), Layout(Mesh({"x": 3}), (6, 2), P("x"))
        options: list[tuple[Any, dict[str, Any]]] = [
            (P("x"), {"sizes": {0: (2, 2, 2)}}), (P("x"), {"shape": (6, 2), "sizes": "chunk"}),
            (P("x"), {"sharding_shapes": {0: [(2, 2)] * 3}}), (layout, {}), (P(), {}),
            ([Partial()], {}), ([Shard(0, sizes=(2, 2, 2))], {}), (None, {}),
        ]
        for spec, told in options:
            ShardTensor.from_local(local, mesh, spec, **told)
        return True

    assert weft.testing.run(on_rank, mesh={"x": 3}) == [True] * 3


@ranks(x=2)
def test_lazy_and_strided_blocks_are_compared(mesh: Any) -> None:
    for local in (torch.ones(2, dtype=torch.complex64).conj(), numbers(5).as_strided((1,), (5,))):
        x = ShardTensor.from_local(local, mesh, [Replicate()], run_check=True)
        assert torch.equal(x.full_tensor(), local)
