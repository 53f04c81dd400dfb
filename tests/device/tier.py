"""What assumes a CPU shows here: cases and programs on the twin device, beside the CPU's results.

It runs in a process of its own (`tests/sim/test_device.py`), by this file's name.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from tests.cases import Case, trials
from tests.cases.every import EVERY
from tests.device import backend
from tests.device.backend import NAME
from tests.harness import check_trial
from weft import P

backend.install()

GRID = {"dp": 2, "tp": 2}
BOTH = P("dp", "tp")
CASES = [case for case in EVERY if case.name in (
    "add", "centre", "std", "einsum_heads", "tile_rows", "cat_empty", "embedding", "softmax",
    "layer_norm", "cross_entropy_ignore_mean", "sdpa_cross", "write_through_view_no_grad",
    "program19", "cumprod_last", "sort_line", "median_dim", "unique", "scatter_cut",
    "masked_positive", "conv2d_groups", "tall_qr_blocks", "fftn", "spectral_convolution",
)]


def on(device_type: str, program: Callable[..., Any], mesh: Any = GRID) -> Any:
    """What rank 1 gets."""
    return weft.testing.run(program, mesh=mesh, device_type=device_type)[1]


def rows(mesh: Any, spec: P = BOTH) -> Tensor:
    return weft.distribute_tensor(torch.arange(15.0).view(5, 3) / 8, mesh, spec)


def whole(tensor: Any) -> Tensor:
    """The global value; on the mesh's device until here."""
    assert {tensor.device.type, tensor.to_local().device.type} == {tensor.device_mesh.device_type}
    return tensor.detach().full_tensor().cpu()


def net(mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.1)
    return weft.distribute_module(block, mesh, shardings={
        "linear1.*": P("tp"), "linear2.weight": P(None, "tp"), "*in_proj_weight": P("tp"),
    })


def step(module: nn.Module, mesh: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    """A step on rows of weft's own random numbers."""
    x = weft.randn(5, 3, 8, mesh=mesh, spec=P("dp"))
    loss = module(x).pow(3).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    optimizer.step()
    return loss


def test_the_device_is_another() -> None:
    x = torch.arange(6.0).view(2, 3).to(NAME)
    with pytest.raises(RuntimeError, match="on the same device"):
        x + torch.ones(3)
    with pytest.raises(TypeError, match="can't convert"):
        x.numpy()
    part = x[1:, ::2]
    part.mul_(2)
    assert x.tolist() == [[0, 1, 2], [6, 4, 10]] and part.data_ptr() == x.data_ptr() + 12


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    check_trial(next(trials(case, [GRID])), NAME)


def test_factories() -> None:
    def program(mesh: Any) -> list[Tensor]:
        options: Any = {"mesh": mesh, "spec": P("dp", "tp")}
        return [whole(one) for one in (
            weft.zeros(5, 3, **options), weft.full((5, 3), 2.0, **options),
            weft.arange(7, mesh=mesh, spec=P("dp")), torch.ones_like(rows(mesh)),
            rows(mesh).new_full((3, 2), 4.0),
        )]

    for found, due in zip(on(NAME, program), on("cpu", program), strict=True):
        assert found.equal(due) and found.dtype is due.dtype


def test_random_numbers_are_those_of_the_cpu() -> None:
    def program(mesh: Any) -> list[Tensor]:
        torch.manual_seed(3)
        x = rows(mesh)
        state = torch.get_rng_state()
        drawn = [whole(one) for one in (
            torch.rand_like(x), torch.bernoulli(x / 2), nn.functional.dropout(x, 0.4),
            torch.randint_like(x, 9), weft.rand(7, mesh=mesh, spec=P("tp")),
        )]
        torch.set_rng_state(state)
        assert whole(torch.rand_like(x)).equal(drawn[0])
        return drawn

    for found, due in zip(on(NAME, program), on("cpu", program), strict=True):
        assert found.equal(due)


def test_training_is_that_of_the_cpu_and_the_host_does_not_wait() -> None:
    def program(mesh: Any) -> tuple[list[Tensor], list[str]]:
        module = net(mesh)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        step(module, mesh, optimizer)
        with backend.host_reads() as reads:
            step(module, mesh, optimizer)
            seen = list(reads)
        return [whole(each) for each in module.parameters()], seen

    found, reads = on(NAME, program)
    torch.testing.assert_close(found, on("cpu", program)[0], rtol=1e-4, atol=1e-5)
    assert reads == []


def test_host_reads_are_seen() -> None:
    with backend.host_reads() as reads:
        x = torch.ones(3, device=NAME)
        x.sum().item()
        x.cpu()
        x[x > 0]
    assert reads == ["aten::_local_scalar_dense", "aten::_copy_from", "aten::index"]


@pytest.mark.parametrize("make", [
    lambda given: torch.optim.AdamW(given, lr=0.1, foreach=False),
    lambda given: torch.optim.Adam(given, lr=torch.tensor(0.1)),
    lambda given: torch.optim.Adafactor(given, lr=0.1),
], ids=["one by one", "a tensor's rate", "adafactor"])
def test_optimizers(make: Any) -> None:
    def program(mesh: Any) -> list[Tensor]:
        torch.manual_seed(0)
        module = weft.distribute_module(nn.Linear(3, 4), mesh, shardings={"weight": P("tp")})
        optimizer = make(module.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            module(rows(mesh)).square().mean().backward()
            optimizer.step()
        return [whole(each) for each in module.parameters()]

    torch.testing.assert_close(on(NAME, program), on("cpu", program), rtol=1e-4, atol=1e-4)


def test_autocast() -> None:
    w = torch.arange(12.0).view(3, 4) / 16

    def program(mesh: Any) -> list[Any]:
        with torch.autocast(NAME, dtype=torch.bfloat16):
            x = rows(mesh).requires_grad_()
            y = x @ weft.distribute_tensor(w, mesh, P("tp"))
            z = torch.softmax(y, -1)
        z.square().sum().backward()
        assert (y.dtype, z.dtype) == (torch.bfloat16, torch.float32)
        return [whole(y.float()), whole(z), whole(x.grad)]

    x = (torch.arange(15.0).view(5, 3) / 8).to(NAME).requires_grad_()
    with torch.autocast(NAME, dtype=torch.bfloat16):
        y = x @ w.to(NAME)
        z = torch.softmax(y, -1)
    z.square().sum().backward()
    due = [one.detach().cpu() for one in (y.float(), z, x.grad)]
    torch.testing.assert_close(on(NAME, program), due, rtol=2e-2, atol=1e-2)


def test_activation_checkpoints() -> None:
    def program(mesh: Any) -> Tensor:
        torch.manual_seed(1)
        x = rows(mesh).requires_grad_()
        kept = checkpoint(lambda t: nn.functional.dropout(t.sin().exp(), 0.3), x,
                          use_reentrant=False)
        kept.sum().backward()
        return whole(x.grad)

    torch.testing.assert_close(on(NAME, program), on("cpu", program))


def test_states_are_saved_and_loaded() -> None:
    def program(mesh: Any) -> None:
        module = net(mesh)
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
        assert {one.to_local().device.type for one in read.values()} == {NAME}
        other = net(mesh)
        nn.init.zeros_(other.linear1.weight)  # type: ignore[arg-type]
        other.load_state_dict(read)
        for name, each in other.state_dict().items():
            assert whole(each).equal(whole(module.state_dict()[name]))

    on(NAME, program)


@pytest.mark.parametrize("spec", [P("dp", "tp"), P(), P(partial={"tp": "sum"})], ids=str)
def test_a_tensor_goes_to_the_cpu_and_back(spec: P) -> None:
    def program(mesh: Any) -> tuple[Tensor, Tensor]:
        x = rows(mesh, P()).requires_grad_()
        there = x.redistribute(placements=spec).cpu()
        assert there.device_mesh.device_type == "cpu" and there.sharding.spec == spec
        assert there.detach().numpy().sum() == x.sum().item()
        back = there.exp().to(NAME, torch.float64)
        assert back.device_mesh is mesh and back.dtype is torch.float64
        back.sum().backward()
        return whole(back), whole(x.grad)

    x = torch.arange(15.0).view(5, 3) / 8
    value, gradient = on(NAME, program)
    torch.testing.assert_close((value, gradient), (x.exp().double(), x.exp()))


def test_a_module_goes_to_the_cpu_and_back() -> None:
    def program(mesh: Any) -> None:
        module = weft.distribute_module(nn.Linear(4, 6), mesh, shardings={"weight": P("tp")})
        module.cpu()
        assert str(module.weight.sharding) == "[6@tp, 4]" and module.weight.is_leaf
        module(torch.ones(2, 4)).sum().backward()
        assert whole(module.weight.grad).eq(2).all()
        module.to(NAME)
        module(torch.ones(2, 4, device=NAME)).sum().backward()
        assert whole(module.weight.grad).eq(4).all()

    on(NAME, program)


def test_a_tensor_of_the_cpu_is_refused_as_torch_refuses_it() -> None:
    with pytest.raises(RuntimeError, match="on the same device"):
        on(NAME, lambda mesh: rows(mesh) + torch.ones(3))
