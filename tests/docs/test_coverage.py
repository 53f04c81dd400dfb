"""docs/coverage.md: each test and each counterpart that it names exists, and no name is missing."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

import torch.distributed.tensor as theirs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug, experimental, parallel, placement_types

import weft
import weft.nn

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "coverage.md").read_text()
HEAD = "| name | weft | what differs | tests |"
CODE = re.compile(r"`([^`]+)`")
ROOTS: dict[str, Any] = {
    "weft": weft, "spmd": weft.spmd, "collectives": weft.collectives, "Layout": weft.Layout,
    "ShardTensor": weft.ShardTensor, "Mesh": weft.Mesh, "BoundMesh": weft.BoundMesh,
    "Placement": weft.Placement,
}

OTHERS = """
    auto_policy XLAShard XLAShardedTensor Mesh HybridMesh ShardingType ShardingSpec XLAPatchedLinear
    mark_sharding clear_sharding wrap_if_sharded xla_distribute_tensor xla_distribute_module
    xla_patched_nn_linear_forward set_global_mesh get_global_mesh get_1d_mesh enable_manual_sharding
    disable_manual_sharding wrap_as_sharded_tensor unwrap_sharded_tensor shard_as
    mark_sharding_with_gradients apply_backward_optimization_barrier visualize_sharding
    visualize_tensor_sharding Mesh.size Mesh.shape Mesh.get_logical_mesh Mesh.get_axis_name_idx
    Mesh.get_op_sharding HybridMesh.ici_mesh_shape HybridMesh.dcn_mesh_shape ShardingSpec.xla_spec
    ShardingSpec.can_apply ShardingSpec.apply ShardingSpec.minibatch XLAShard.data XLAShard.indices
    XLAShard.shard_device XLAShard.replica_id XLAShard.unpadded_data XLAShardedTensor.global_tensor
    XLAShardedTensor.mesh_shape XLAShardedTensor.partition_spec XLAShardedTensor.local_shards
    XLAShardedTensor.load_local_shards_ XLAShardedTensor.sharding_spec
    XLAShardedTensor.sharding_type ShardTensor scatter_tensor ShardTensorSpec ShardTensor.from_local
    ShardTensor.from_dtensor
    ShardTensor.offsets ShardTensor.redistribute ShardTensor.to_local ShardTensor.full_tensor
    ShardTensor.backward ShardTensor.patches_enabled ShardTensor.register_dispatch_handler
    ShardTensor.register_function_handler ShardTensor.register_named_function_handler
    ShardTensorSpec.sharding_shapes ShardTensorSpec.local_shape ShardTensorSpec.offsets
    manual_seed is_rng_supported_mesh OffsetBasedRNGTracker Redistribute redistribute_local_tensor
    use_min_cost_redistribution_plan disable_redistribute_transform_optimization
"""
"""Names of packages that are not installed here, and of torch's modules without a list."""


def rows(page: str) -> list[list[str]]:
    """Cells of the rows of all tables."""
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines()
        if line.startswith("| ") and line != HEAD
    ]


@functools.cache
def functions_of(file: str) -> frozenset[str]:
    """The test functions of a file, found without importing it."""
    tree = ast.parse((REPOSITORY / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef)
                     and node.name.startswith("test_"))


def is_a_test(named: str) -> bool:
    file, _, name = named.partition("::")
    return (REPOSITORY / file).is_file() and name in functions_of(file)


def exists(named: str) -> bool:
    """Whether weft has it: by attribute, or among the annotations of a class."""
    first, *rest = named.split("(")[0].split(".")
    found = ROOTS.get(first)
    for part in rest:
        if isinstance(found, type) and any(part in vars(kind).get("__annotations__", ())
                                           for kind in found.__mro__):
            return True
        found = getattr(found, part, None)
    return found is not None


def counterparts(cell: str) -> list[str]:
    return [name for name in CODE.findall(cell) if name.split("(")[0].split(".")[0] in ROOTS]


def test_every_test_exists() -> None:
    named = [(row[0], test) for row in rows(PAGE) for test in CODE.findall(row[3])]
    assert len(named) > 100
    assert [each for each in named if not is_a_test(each[1])] == []


def test_every_row_has_its_parts() -> None:
    found = rows(PAGE)
    assert len(found) > 70 and PAGE.count(HEAD) == 6
    for row in found:
        name, ours, differs, tests = row
        assert name and differs.endswith(".") and CODE.findall(tests), row
        assert ours.startswith("none: ") or counterparts(ours), row


def test_every_counterpart_exists() -> None:
    named = {name for row in rows(PAGE) for name in counterparts(row[1])}
    assert len(named) > 90
    assert sorted(name for name in named if not exists(name)) == []


def test_no_name_is_missing() -> None:
    told = {name.split("(")[0] for row in rows(PAGE) for name in CODE.findall(row[0])}
    public = {*theirs.__all__, *parallel.__all__, *experimental.__all__, *debug.__all__}
    public |= {kind for kind in vars(placement_types) if kind in (
        "Placement", "Shard", "_StridedShard", "Replicate", "Partial", "_MaskPartial")}
    for kind in (theirs.DTensor, DeviceMesh, theirs.Placement, theirs.Shard, theirs.Partial):
        public |= {f"{kind.__name__}.{name}" for name in vars(kind) if not name.startswith("_")}
    assert public - told == set()
    assert {*OTHERS.split()} - told == set()


def test_all_of_spmd_is_there() -> None:
    """What weft has torch_xla's names for stands in the page."""
    named = {name.split(".")[1] for row in rows(PAGE) for name in counterparts(row[1])
             if name.startswith("spmd.")}
    assert set(weft.spmd.__all__) - named == set()


def test_what_is_wrong_is_found() -> None:
    assert is_a_test("tests/docs/test_coverage.py::test_what_is_wrong_is_found")
    for wrong in ("tests/docs/test_coverage.py::test_nothing", "tests/nowhere.py::test_it",
                  "tests/docs/test_coverage.py", "tests/docs/test_coverage.py::rows"):
        assert not is_a_test(wrong)
    for wrong in ("weft.nonsense", "spmd.LocalShard.nonsense", "ShardTensor.from_locals"):
        assert not exists(wrong)
    assert exists("spmd.LocalShard.data") and exists("ShardTensor.from_local(run_check=True)")
