"""To which library a ShardTensor belongs, for those who look at the module of its class."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import sys
import typing
from typing import Any

import cloudpickle
import pytest
import torch

import weft
from tests.oracle import same
from weft import P, ShardTensor
from weft.tensor import shard_tensor


def test_the_first_part_is_torch() -> None:
    name = ShardTensor.__module__
    assert name.split(".")[0] == name.partition(".")[0] == "torch"
    assert name.split(".", 1)[0] == "torch" and name.startswith("torch.")
    assert not name.startswith(("numpy", "jax"))


def test_the_class_is_found_where_it_is() -> None:
    assert ShardTensor.__module__ == "weft.tensor.shard_tensor" == f"{ShardTensor.__module__}"
    assert repr(ShardTensor) == "<class 'weft.tensor.shard_tensor.ShardTensor'>"
    assert sys.modules[ShardTensor.__module__] is shard_tensor
    assert inspect.getmodule(ShardTensor) is shard_tensor
    assert inspect.getsource(ShardTensor).startswith("class ShardTensor(")
    assert "_local" in typing.get_type_hints(ShardTensor)
    assert ShardTensor.from_local.__module__ == "weft.tensor.shard_tensor"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_class_in_pickles(protocol: int) -> None:
    written = pickle.dumps([ShardTensor, ShardTensor.__module__], protocol)
    found, name = pickle.loads(written)
    assert found is ShardTensor and type(name) is str
    assert pickle._loads(written)[0] is ShardTensor  # type: ignore[attr-defined]
    slow = io.BytesIO()
    pickle._Pickler(slow, protocol).dump(ShardTensor)  # type: ignore[attr-defined]
    assert pickle.loads(slow.getvalue()) is ShardTensor
    if protocol < 4:  # as it was written before the module had such a name
        assert b"cweft.tensor.shard_tensor\nShardTensor\n" in pickle.dumps(ShardTensor, protocol)
    assert pickle.loads(cloudpickle.dumps(lambda: ShardTensor))() is ShardTensor
    assert copy.deepcopy(ShardTensor) is ShardTensor


def test_pickles_of_before() -> None:
    assert pickle.loads(b"cweft.tensor.shard_tensor\nShardTensor\n.") is ShardTensor


def test_opt_einsum() -> None:
    """Contractions of ShardTensors are torch's, with their gradients."""
    opt_einsum: Any = pytest.importorskip("opt_einsum")
    left, right = torch.arange(12.0).view(4, 3), torch.arange(6.0).view(3, 2)

    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(left, mesh, P("x")).requires_grad_()
        y = weft.distribute_tensor(right, mesh, P()).requires_grad_()
        out = opt_einsum.contract("ij,jk->ki", x, y)
        assert type(out) is ShardTensor and out.sharding.spec == P(None, "x")
        same(out.full_tensor().detach(), (left @ right).t(), "contract")
        out.sum().backward()
        assert x.grad is not None
        same(x.grad.full_tensor(), right.sum(1).expand(4, 3), "gradient")

    weft.testing.run(on_rank, mesh={"x": 2})
