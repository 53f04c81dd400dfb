"""torch's wrappers of modules refuse modules on a mesh, before anything else happens.

Here they are imported after weft, which the folder's conftest.py brings; those that were imported
before it are in test_tensor_takeover.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard import fully_shard as as_imported_elsewhere
from torch.nn.parallel import DistributedDataParallel

import weft
from weft import ModuleError, P


class Own(DistributedDataParallel):
    """A subclass of a wrapper."""


WRAPPERS: dict[str, Any] = {
    "fully_shard(module)": fully_shard,
    "fully_shard(module) of a list": lambda module: fully_shard([module[0], module[1]]),
    "fully_shard(module) by name": lambda module: as_imported_elsewhere(module=module),
    "FullyShardedDataParallel(module)": FullyShardedDataParallel,
    "DistributedDataParallel(module)": DistributedDataParallel,
    "DistributedDataParallel(module) by name": lambda m: DistributedDataParallel(module=m),
    "DistributedDataParallel(module) of a subclass": Own,
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_module_on_a_mesh_is_refused(name: str) -> None:
    def on_rank(mesh: Any) -> str:
        module = weft.distribute_module(model(), mesh, shardings={"1.*": P("dp")})
        with pytest.raises(ModuleError) as told:
            WRAPPERS[name](module)
        return str(told.value)

    told = {
        text.replace("weight: [5, 4], bias: [5], weight: [2@dp, 5], bias: [2@dp]",
                     "0.weight: [5, 4], 0.bias: [5], 1.weight: [2@dp, 5], 1.bias: [2@dp]")
        for text in weft.testing.run(on_rank, mesh={"dp": 2})
    }
    assert told == {f"""\
{name.split(" ")[0]}: 4 of 4 parameters and buffers are ShardTensors.
  Rule: a module on a mesh needs no wrapper: weft sums the gradients of replicated parameters over \
the mesh, and gathers those that are sharded for their use.
  Offenders: 0.weight: [5, 4], 0.bias: [5], 1.weight: [2@dp, 5], 1.bias: [2@dp]
  Fix: leave the wrapper out. With the batch sharded over dp, weft.distribute_module(module, mesh, \
shardings={{"*": P("dp")}}) does what fully_shard does, and without shardings= what DDP does
       where a library wraps it (accelerate, Trainer of transformers): with \
weft.nn.as_one_process(): ... around all that the library does"""}


def test_a_module_on_a_part_of_the_mesh_is_told_of_the_group_beside_it() -> None:
    def on_rank(mesh: Any) -> list[str]:
        module = weft.distribute_module(model(), mesh["domain"])
        with pytest.raises(ModuleError) as told:
            DistributedDataParallel(module)
        return str(told.value).splitlines()[4:6]

    for lines in weft.testing.run(on_rank, mesh={"ddp": 2, "domain": 2}):
        assert lines == [
            "       beside 'domain': weft.init_mesh({'dp': 2, 'domain': 2}), "
            'and the batch P("dp")',
            '       DistributedDataParallel takes process_group=mesh.get_group("dp") and the '
            "module on the rest of the mesh"]


def test_the_fix_does_what_it_says() -> None:
    """Of a batch that is cut over dp: gradients of the whole batch, of each rank's own part."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    plain = model()
    plain(x).square().mean().backward()

    def on_rank(mesh: Any) -> None:
        for shardings in ({"*": P("dp")}, None):
            module = weft.distribute_module(model(), mesh, shardings=shardings)
            module(weft.distribute_tensor(x, mesh, P("dp"))).square().mean().backward()
            for (name, one), due in zip(module.named_parameters(), plain.parameters()):
                assert one.grad is not None and due.grad is not None
                assert one.grad.sharding.spec == (P("dp") if shardings else P()), name
                torch.testing.assert_close(one.grad.full_tensor(), due.grad)

    weft.testing.run(on_rank, mesh={"dp": 2})


def test_plain_modules_come_to_torch() -> None:
    for wrap in (fully_shard, DistributedDataParallel):
        with pytest.raises(ValueError, match=r"torch\.distributed|process group"):
            wrap(model())


def test_ddp_of_a_plain_module_refuses_shard_tensors() -> None:
    """It needs a process group to be made; what is called here is its forward."""
    def on_rank(mesh: Any) -> list[str]:
        x, told = weft.ones(4, 6, mesh=mesh, spec=P("dp")), []
        for call in (
            lambda: DistributedDataParallel.forward(nn.Module(), x),  # type: ignore[arg-type]
            lambda: DistributedDataParallel.forward(nn.Module(), input=[x]),  # type: ignore
        ):
            with pytest.raises(ModuleError) as error:
                call()
            told.append(str(error.value))
        return told

    for told in weft.testing.run(on_rank, mesh={"dp": 2}):
        assert told == ["""\
DistributedDataParallel.forward(...): 1 of its inputs are ShardTensors.
  Rule: weft sums the gradients of replicated parameters over the mesh, plain ones too.
  Offenders: [4@dp, 6]
  Fix: call the module itself, without the wrapper
       where a library wraps it (accelerate, Trainer of transformers): with \
weft.nn.as_one_process(): ... around all that the library does"""] * 2
