"""A module over processes: laid out on the meta device, made, pinned, trained, saved and loaded, as
on simulated ranks."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import tensor as dtensor
from torch.distributed.fsdp import fully_shard

import weft
from tests.gloo import GlooWorld
from weft import P
from weft.errors import ModuleError
from weft.nn import ColwiseParallel, RowwiseParallel, SequenceParallel, materialize, report

MESH = {"dp": 2, "tp": 2}
SHARDINGS = {"0": ColwiseParallel("tp"), "2": RowwiseParallel("tp"), "3": SequenceParallel("tp")}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6), nn.LayerNorm(6))


def trained(mesh: Any) -> tuple[list[float], dict[str, Tensor], str]:
    with torch.device("meta"):
        module = build()
    weft.distribute_module(module, mesh, shardings=SHARDINGS, activations={"1": P("dp")})
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    torch.manual_seed(3)
    materialize(module)
    batch = weft.randn(3, 5, 6, mesh=mesh, spec=P("dp"))
    losses = []
    for _ in range(3):
        loss = (module(batch) - batch.roll(1, 0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    with torch.device("meta"):
        other = weft.distribute_module(build(), mesh, shardings=SHARDINGS)
    other.to_empty(device="cpu")
    other.load_state_dict(torch.load(file))
    return losses, {name: x.full_tensor() for name, x in other.state_dict().items()}, str(
        report(module))


def test_as_on_simulated_ranks(gloo: GlooWorld) -> None:
    losses, state, text = weft.testing.run(trained, 4, MESH)[0]
    assert losses[2] < losses[0] and "inputs of 3 pinned" in text
    for mine in gloo.run(trained, MESH):
        assert mine[0] == losses and mine[2] == text
        assert all(torch.equal(mine[1][name], each) for name, each in state.items())


def calls_of(library: str, mesh: Any) -> tuple[list[Any], list[Any], Tensor]:
    """What torch's distribute_module, or weft's, does with the functions that it is given."""
    ours = library == "weft"
    on = mesh if ours else mesh.device_mesh
    distribute: Any = weft.distribute_tensor if ours else dtensor.distribute_tensor
    cut = [weft.Replicate(), weft.Shard(0)] if ours else [dtensor.Replicate(), dtensor.Shard(0)]
    whole = [weft.Replicate()] * 2 if ours else [dtensor.Replicate()] * 2
    calls: list[Any] = []

    def partition(name: str, module: nn.Module, given: Any) -> None:
        calls.append(("partition", name, type(module).__name__, given.mesh_dim_names))
        if name == "0":
            weight: Any = module.weight
            made = nn.Parameter(distribute(weight.detach(), on, cut))
            module.register_parameter("weight", made)

    def before(module: nn.Module, inputs: Any, given: Any) -> Any:
        calls.append(("input", type(module).__name__, len(inputs), given.mesh_dim_names))
        return tuple(distribute(one, on, whole) for one in inputs)

    def before_of_two(inputs: Any, given: Any) -> Any:
        return before(module, inputs, given)

    def after(module: nn.Module, out: Any, given: Any) -> Any:
        calls.append(("output", type(module).__name__, tuple(out.shape), given.mesh_dim_names))
        return out.full_tensor()

    distribute_module: Any = weft.distribute_module if ours else dtensor.distribute_module
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).eval()
    module[2].bias.requires_grad_(False)
    module.register_forward_hook(lambda *_: calls.append("own"))
    distribute_module(module, on, partition, before, after)
    x = torch.arange(12.0).view(3, 4)
    out = module(x)
    kept: list[Any] = [
        (name, each.requires_grad, tuple(str(one)[:1] for one in each.placements))
        for name, each in [*module.named_parameters(), *module.named_buffers()]
    ]
    for arguments, expected in (
        ((module, on), RuntimeError), ((nn.Linear(2, 2), on, None, lambda x: x), ValueError),
        ((nn.Linear(2, 2), on, None, None, lambda x: x), ValueError),
    ):
        with pytest.raises(expected):
            distribute_module(*arguments)
    other = nn.Sequential(nn.Linear(4, 2))
    other.load_state_dict({"0.weight": torch.ones(2, 4), "0.bias": torch.ones(2)})
    with pytest.warns(FutureWarning):
        distribute_module(other, on, None, before_of_two)
    calls.append(tuple(other(x).full_tensor().flatten().tolist()))
    return calls, kept, out


def both(mesh: Any) -> tuple[Any, Any]:
    return calls_of("torch", mesh), calls_of("weft", mesh)


def test_it_does_as_torch_s_own(gloo: GlooWorld) -> None:
    for theirs, ours in gloo.run(both, MESH):
        assert ours[:2] == theirs[:2] and len(ours[0]) == 9
        torch.testing.assert_close(ours[2], theirs[2])


def left_without_values(mesh: Any) -> str:
    with torch.device("meta"):
        module = nn.Linear(1, 1)  # which three of four ranks have nothing of
    weft.distribute_module(module, mesh, shardings={"*": P(("dp", "tp"))})
    with pytest.raises(ModuleError) as caught:
        materialize(module, lambda part: None)
    return str(caught.value)


def test_all_ranks_are_told_what_nothing_was_written_to(gloo: GlooWorld) -> None:
    for said in gloo.run(left_without_values, MESH):
        assert "Offenders: weight, bias\n" in said


def kept(mesh: Any) -> list[float]:
    """Each rank's own values, nothing sent."""
    module = nn.Linear(2, 4)
    nn.init.constant_(module.weight, mesh.rank)
    weft.distribute_module(module, mesh, shardings={"*": P(("dp", "tp"))}, src_data_rank=None)
    return module.weight.full_tensor().flatten().tolist()  # type: ignore[operator]


def test_each_rank_s_own_values(gloo: GlooWorld) -> None:
    for found in gloo.run(kept, MESH):
        assert found == pytest.approx([0, 0, 1, 1, 2, 2, 3, 3])


def wrapped(mesh: Any) -> list[str]:
    told = []
    module = weft.distribute_module(build(), mesh, shardings={"*": P("dp")})
    for wrap in (fully_shard, nn.parallel.DistributedDataParallel):
        with pytest.raises(ModuleError) as caught:
            wrap(module)
        told.append(str(caught.value))
    return told


def test_wrappers_of_torch_raise_on_all_ranks(gloo: GlooWorld) -> None:
    """`fully_shard` used to abort the processes in C++."""
    first, *others = gloo.run(wrapped, MESH)
    assert [text.split(":")[0] for text in first] == [
        "fully_shard(module)", "DistributedDataParallel(module)"]
    assert all(other == first for other in others)
