"""A call of `redistribute` whose way is known already gives what the first one gave."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from weft import Layout, P, Replicate, Shard
from weft.errors import PlacementError

FULL = torch.arange(15.0).view(5, 3)


def on_four(fn: Any) -> list[Any]:
    return weft.testing.run(fn, mesh={"a": 2, "b": 2})


def test_every_spelling_leads_to_the_same_layout() -> None:
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(FULL, mesh, P("a", "b"))
        want = Layout(mesh, (5, 3), P(None, "a"))
        like = weft.distribute_tensor(FULL, mesh, want)
        placements = [Shard(1), Replicate()]
        for _ in range(2):
            for given in (P(None, "a"), placements, tuple(placements), want, like):
                assert x.redistribute(placements=given).sharding == want
                assert x.redistribute(mesh, given).sharding == want

    on_four(on_rank)


@pytest.mark.parametrize("dst", [P("a"), P("a", "b"), P(), P("b")], ids=str)
def test_a_result_requires_grad_where_autograd_records(dst: P) -> None:
    """Where nothing is to be done (P("a")) and on ranks outside, too."""
    def on_rank(world: Any) -> None:
        for mesh in (world, world["a"]):
            spec = P("a") if mesh.ndim == 2 else P("a", None)
            target = dst if mesh.ndim == 2 else P() if dst == P("b") else P("a")
            x = weft.distribute_tensor(FULL, mesh, spec, src_data_rank=None).requires_grad_()
            for _ in range(2):
                with torch.no_grad():
                    still = x.redistribute(placements=target)
                assert not still.requires_grad and not still.to_local().requires_grad
                moved = x.redistribute(placements=target)
                assert moved.requires_grad and moved.grad_fn is not None
                assert still.sharding == moved.sharding == Layout(mesh, (5, 3), target)

    on_four(on_rank)


def test_equal_meshes_on_other_devices_are_told_apart() -> None:
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(FULL, mesh, P("a")).requires_grad_()
        on_meta = weft.init_mesh({"a": 2, "b": 2}, "meta")
        for _ in range(2):
            for device_mesh, device in ((mesh, "cpu"), (on_meta, "meta"), (None, "cpu")):
                for spec in (P("a"), P("b")):
                    y = x.redistribute(device_mesh, spec)
                    assert y.device.type == y.to_local().device.type == device
                    assert y.device_mesh.device_type == device
                    assert y.sharding == Layout(mesh, (5, 3), spec)

    on_four(on_rank)


def test_what_is_refused_is_refused_each_time() -> None:
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(FULL, mesh, P("a"))
        for given in ([Shard(0)], [Shard(0), ["b"]], None):
            for _ in range(2):
                with pytest.raises((PlacementError, weft.errors.ShardTypeError, TypeError)) as seen:
                    x.redistribute(placements=given)
                assert seen.value.__context__ is None

    on_four(on_rank)
