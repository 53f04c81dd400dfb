"""torch.distributed's own collectives refuse ShardTensors, whose values are global already."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import all_reduce as imported
from torch.distributed.nn import functional as nn_functional

import weft
from weft import P, UnsupportedOpError

PLAIN = torch.zeros(())
GROUP: Any = object()
NAME: Any = "g"


def plains() -> list[torch.Tensor]:
    return [torch.zeros(()), torch.zeros(())]


CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "all_reduce by keyword": lambda x: dist.all_reduce(op=dist.ReduceOp.MAX, tensor=x),
    "all_reduce imported": lambda x: imported(x),
    "all_reduce_coalesced": lambda x: dist.all_reduce_coalesced([PLAIN, x]),
    "all_gather of x": lambda x: dist.all_gather(plains(), x),
    "all_gather into x": lambda x: dist.all_gather([x, x], PLAIN),
    "all_gather_coalesced": lambda x: dist.all_gather_coalesced([plains(), plains()], [PLAIN, x]),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(torch.zeros(2), x),
    "all_gather_into_tensor x": lambda x: dist.all_gather_into_tensor(x, torch.zeros(1)),
    "_all_gather_base": lambda x: dist._all_gather_base(torch.zeros(2), x),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "reduce_scatter": lambda x: dist.reduce_scatter(PLAIN, [x, x]),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(torch.zeros(1), x),
    "_reduce_scatter_base": lambda x: dist._reduce_scatter_base(torch.zeros(1), x),
    "all_to_all": lambda x: dist.all_to_all(plains(), [x, x]),
    "all_to_all_single": lambda x: dist.all_to_all_single(torch.zeros(2), x),
    "gather": lambda x: dist.gather(x, plains()),
    "gather into x": lambda x: dist.gather(PLAIN, [x, x]),
    "scatter": lambda x: dist.scatter(PLAIN, [x, x]),
    "send": lambda x: dist.send(x, 1),
    "recv": lambda x: dist.recv(x, 1),
    "isend": lambda x: dist.isend(x, 1),
    "irecv": lambda x: dist.irecv(x, 1),
    "functional all_reduce": lambda x: functional.all_reduce(x, "sum", NAME),
    "functional op": lambda x: torch.ops._c10d_functional.all_reduce(x, "sum", NAME),
    "functional op on a list": lambda x: torch.ops._c10d_functional.all_reduce_coalesced(
        [PLAIN, x], "sum", NAME),
    "functional broadcast": lambda x: functional.broadcast(x, 0, NAME),
    "functional all_to_all": lambda x: torch.ops._c10d_functional.all_to_all_single(
        x, [1], [1], NAME),
    "functional wait": lambda x: functional.wait_tensor(x),
    "nn.functional.all_reduce": lambda x: nn_functional.all_reduce(x, group=GROUP),
    "nn.functional.all_gather": lambda x: nn_functional.all_gather(x, group=GROUP),
    "nn.functional.reduce_scatter": lambda x: nn_functional.reduce_scatter(
        PLAIN, [x, x], group=GROUP),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("spec", [P("dp"), P(partial={"dp": "sum"}), P()], ids=str)
def test_a_collective_of_torch_refuses_a_shard_tensor(name: str, spec: P) -> None:
    def program(mesh: Any) -> str:
        x = weft.ones(2, mesh=mesh).redistribute(mesh, spec)
        with warnings.catch_warnings(), pytest.raises(UnsupportedOpError) as error:
            warnings.simplefilter("ignore", FutureWarning)  # that torch will rename some
            CALLS[name](x)
        return str(error.value)

    texts = weft.testing.run(program, 2, {"dp": 2})
    assert texts[0] == texts[1]
    assert "a ShardTensor is one global value" in texts[0]
    assert "sync_on_compute=False" in texts[0] and "x.to_local()" in texts[0]


def test_the_words() -> None:
    def program(mesh: Any) -> None:
        loss = weft.ones(4, mesh=mesh, spec=P("dp")).sum()
        dist.all_reduce(loss)

    with pytest.raises(UnsupportedOpError) as error:
        weft.testing.run(program, 2, {"dp": 2})
    assert str(error.value).splitlines()[:5] == [
        "torch.distributed.all_reduce(...): a ShardTensor is among its arguments.",
        "  Rule: a ShardTensor is one global value, the same on all ranks: there is nothing to "
        "reduce, gather or send.",
        "  Offenders: [] partial(sum@dp)",
        "  Fix: leave the call out: x.item() and x.full_tensor() give the global value on every "
        "rank",
        "       torchmetrics, whose metrics gather by themselves: Metric(..., "
        "sync_on_compute=False)",
    ]


def test_a_plain_sum_of_shard_tensors_is_global_until_it_is_written_to() -> None:
    """`dist` itself would say that there is no process group."""
    def program(mesh: Any) -> list[Any]:
        total, loss = torch.zeros(()), weft.ones(4, mesh=mesh, spec=P("dp")).sum()
        said = []
        for change in (
            lambda: total.add_(loss), lambda: total.add_(loss), lambda: total.zero_(),
            lambda: torch.add(loss, loss, out=total), lambda: total.fill_(2),
        ):
            change()
            try:
                dist.all_reduce(total)
            except (UnsupportedOpError, ValueError) as error:
                said.append((type(error).__name__, "sync_on_compute=False" in str(error)))
        return said

    refused, passed = ("UnsupportedOpError", True), ("ValueError", False)
    expected = [refused, refused, passed, refused, passed]
    assert weft.testing.run(program, 2, {"dp": 2}) == [expected, expected]


class Summed(torch.autograd.Function):
    """As of a program that is parallel by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = x.clone()
        dist.all_reduce(x)
        return x


def test_a_function_on_full_tensors_has_nothing_to_send() -> None:
    def program(mesh: Any) -> str:
        x = weft.ones(4, mesh=mesh, spec=P("dp"))
        with pytest.raises(UnsupportedOpError) as error:
            Summed.apply(x)
        with pytest.raises(ValueError, match="process group"):  # of torch: elsewhere it goes on
            Summed.apply(torch.ones(4))
        return str(error.value)

    for text in weft.testing.run(program, 2, {"dp": 2}):
        assert "it is called in Summed.forward, which was given full tensors" in text


LATER = """
import warnings
warnings.simplefilter("ignore")
import inspect
import torch
import torch.distributed as dist
before = inspect.signature(dist.all_gather)
import weft
assert inspect.signature(dist.all_gather) == before
import torch.distributed.optim  # scripts functions of torch
import torch.distributed.nn
import torch._decomp.decompositions_for_jvp, torch.jit._decompositions
import torch.ao.nn.quantizable, torch.distributed.checkpoint, torch.distributed.fsdp
print(dist.all_reduce.__name__, dist.all_reduce.__module__)
"""


def test_torch_goes_on_as_ever_after_weft() -> None:
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True,
                          timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["all_reduce", "torch.distributed.distributed_c10d"]
