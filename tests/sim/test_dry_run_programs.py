"""Training loops as users write them: a dry run has the collectives and the memory of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.second_step import facts, second_step
from weft import P
from weft.testing import peak_memory

AXES = {"dp": 2, "tp": 2}


class Model(nn.Module):
    """Tied weights, positions, a hidden layer; the loss is asked for with the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(24, 16), nn.Embedding(8, 16)
        self.norm, self.drop = nn.LayerNorm(16), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        x = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        if targets is None:
            return self.head(x[:, [-1]])
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=-1)


def data(mesh: Any) -> Any:
    """Batches of one epoch."""
    torch.manual_seed(1)
    ids = torch.randint(24, (16, 9))
    for one, other in DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), 8, shuffle=True):
        yield [weft.distribute_tensor(each, mesh, P("dp")) for each in (one, other)]


def pretraining(shardings: dict[str, P], path: Path) -> None:
    """Microbatches under autocast, clipped, with rates by hand, evaluation and checkpoints."""
    mesh = weft.init_mesh(AXES)
    model = weft.distribute_module(Model(), mesh, shardings=shardings)
    groups = [{"params": [one for one in model.parameters() if (one.dim() > 1) is is_matrix],
               "weight_decay": 0.1 * is_matrix} for is_matrix in (True, False)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    cast = torch.autocast("cpu", torch.bfloat16)
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1)
        with torch.no_grad(), cast:
            model.eval()
            best = model(*next(data(mesh))).item()
            model.train()
        for batch in data(mesh):
            with cast:
                loss = model(*batch) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if mesh.rank == 9:
            torch.save({"model": model.state_dict(), "best": best}, path)


def accumulating(shardings: dict[str, P], path: Path) -> None:
    """Gradients that stay partial for a step, a scheduler, and an average of the parameters."""
    mesh = weft.init_mesh(AXES)
    model = weft.distribute_module(Model(), mesh, shardings=shardings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    slow = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    mean = {name: one.detach().clone() for name, one in model.named_parameters()}
    for _ in range(3):
        *first, last = data(mesh)
        for batch in first:
            with weft.nn.accumulate(model):
                model(*batch).backward()
        model(*last).backward()
        optimizer.step()
        slow.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, one in model.named_parameters():
                mean[name].lerp_(one, 0.1)


def recomputing(shardings: dict[str, P], path: Path) -> None:
    """Layers with dropout are computed again: each keeps the state of torch's generator."""
    mesh = weft.init_mesh(AXES)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)) for _ in range(6)]
    model = weft.distribute_module(nn.Sequential(*layers), mesh, shardings=shardings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = weft.ones(8, 16, mesh=mesh, placements=P("dp"), requires_grad=True)
        for at, layer in enumerate(model):
            x = checkpoint(layer, x, use_reentrant=at % 2 == step % 2)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("program", "shardings"), [
    (pretraining, {"up.weight": P("tp"), "down.weight": P(None, "tp")}),
    (accumulating, {"*": P("dp")}),
    (recomputing, {}),
    (recomputing, {"*": P("dp")}),
])
def test_as_a_run(
    program: Callable[..., None], shardings: dict[str, P], tmp_path: Path
) -> None:
    def run() -> None:
        program(shardings, tmp_path / "model.pt")

    real = weft.testing.run(lambda mesh: second_step(run), mesh=AXES)
    dry = weft.dry_run(lambda mesh: run(), AXES, rank=3)
    assert [facts(event) for event in dry.log.events] == real[3].events
    assert dry.memory.peak == real[3].peak and not [*tmp_path.iterdir()]


def test_weights_alone_are_channels_last() -> None:
    """Kernels lay results out as weights lie, which torch's meta kernel does not; a copy in
    another order is made once."""
    def program() -> None:
        mesh = weft.init_mesh({"dp": 2})
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
                              nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        weft.distribute_module(model, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            x = weft.randn(6, 3, 14, 10, mesh=mesh, placements=P("dp"))
            loss = model(x).square().mean()
            optimizer.zero_grad()  # so that the forward has the peak
            loss.backward()
            optimizer.step()

    real = weft.testing.run(lambda mesh: second_step(program), mesh={"dp": 2})
    assert weft.dry_run(lambda mesh: program(), {"dp": 2}).memory.peak == real[0].peak


NETWORKS: dict[str, Callable[[], Any]] = {
    "lstm": lambda: nn.LSTM(24, 40),
    "two ways": lambda: nn.LSTM(24, 20, 2, bias=False, bidirectional=True, dropout=0.1),
    "bfloat16": lambda: nn.LSTM(24, 40).bfloat16(),
    "by steps": lambda: nn.LSTM(24, 40, proj_size=8).double(),
    "gru": lambda: nn.GRU(24, 20, 2, bidirectional=True, dropout=0.1),
    "rnn": lambda: nn.RNN(24, 20, bidirectional=True),
    "without biases": lambda: nn.GRU(24, 20, bias=False),  # each step's product would be the peak
}


@pytest.mark.parametrize("dim", ["batch", "time"])
@pytest.mark.parametrize("name", NETWORKS)
def test_recurrent_networks_keep_what_they_keep_on_the_cpu(name: str, dim: str) -> None:
    """The kernel of an LSTM has a workspace, where torch's meta kernel has gates."""
    def program() -> None:
        mesh = weft.init_mesh({"dp": 2})
        model = NETWORKS[name]()
        weft.distribute_module(model, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dtype = next(model.parameters()).dtype
        for _ in range(2):
            x = weft.randn(8, 6, 24, mesh=mesh, dtype=dtype,
                           placements=P("dp") if dim == "time" else P(None, "dp"))
            model(x)[0].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    real = weft.testing.run(lambda mesh: second_step(program), mesh={"dp": 2})
    dry = weft.dry_run(lambda mesh: program(), {"dp": 2})
    assert [facts(event) for event in dry.log.events] == real[0].events
    assert dry.memory.peak == real[0].peak
    if name == "lstm":  # of each rank, in forward and twice in backward
        assert dry.flops == 3 * 2 * 8 * 6 // 2 * 4 * 40 * (24 + 40)


def test_values_that_a_script_reads_or_checks() -> None:
    """Of data that nobody has: they are finite, equal where that is asked, and 0 where one is read.
    """
    def program(mesh: Any) -> None:
        x: Any = weft.randn(4, 6, mesh=mesh, placements=P()).to_local() * torch.ones(4, 6)
        assert f"loss {x.mean():.2f}" == "loss 0.00" and x[0].tolist() == [0.0] * 6
        assert x[:2].numpy().shape == (2, 6) and torch.equal(x, x + 1) and torch.allclose(x, -x)
        assert torch.isfinite(x).all() and not torch.isnan(x).any() and not torch.isinf(x).any()
        assert torch.distributions.Normal(x, x.exp()).rsample().shape == (4, 6)
        assert torch.distributions.Categorical(logits=x).sample().shape == (4,)
        assert x.masked_select(x > 0).shape == x.unique_consecutive().shape == (24,)
        assert torch.linalg.lstsq(x, x[:, :2]).solution.shape == (6, 2)
        assert x.repeat_interleave((x > 0).sum(1), 0).shape == (4, 6)
        sharded = weft.randn(4, 6, mesh=mesh, placements=P("dp")).requires_grad_()
        for chosen in (sharded[sharded > 0], sharded.masked_select(sharded > 0)):
            assert chosen.shape == (24,)  # by masks of unknown values, all are
            chosen.mean().backward()

    checks = torch.distributions.Distribution._validate_args  # torch.compile turns them off
    weft.dry_run(program, {"dp": 2}, steps=None)
    assert torch.distributions.Distribution._validate_args is checks


@pytest.mark.parametrize("loss", [
    lambda y: F.mse_loss(y, -y, reduction="sum"), lambda y: F.mish(y).mean(),
    lambda y: F.soft_margin_loss(y, y.detach().sign(), reduction="sum")])
def test_losses_keep_what_their_kernels_keep(loss: Callable[[Any], Any]) -> None:
    """A sum lies in the memory of its terms; the derivative of mish is one kernel."""
    def program() -> None:
        mesh = weft.init_mesh({"dp": 2})
        model: Any = nn.Linear(32, 32)
        weft.distribute_module(model, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss(model(weft.randn(128, 32, mesh=mesh, placements=P("dp")))).backward()
            optimizer.step()
            optimizer.zero_grad()

    real = weft.testing.run(lambda mesh: second_step(program), mesh={"dp": 2})
    assert weft.dry_run(lambda mesh: program(), {"dp": 2}).memory.peak == real[0].peak


@pytest.mark.parametrize("shardings", [{}, {"*": P("dp")}])
def test_what_autocast_has_cast_lives_until_its_region_ends(shardings: dict[str, P]) -> None:
    """One cast for all uses of a parameter, also where nothing is kept for a backward. What a
    program makes inside of a mode of its own counts as well."""
    def program() -> None:
        mesh = weft.init_mesh({"dp": 2})
        layers: Any = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        weft.distribute_module(layers, mesh, shardings=shardings)
        optimizer = torch.optim.SGD(layers[0].parameters())
        x = weft.distribute_tensor(torch.randn(2, 64), mesh, P("dp"))
        for _ in range(2):
            with peak_memory(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                plain = torch.ones(5000)
                layers(layers(x))
                plain.add_(1)
            layers[0](x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    real = weft.testing.run(lambda mesh: second_step(program), mesh={"dp": 2})
    assert weft.dry_run(lambda mesh: program(), {"dp": 2}).memory.peak == real[0].peak


def test_products_of_two_dtypes_are_cast() -> None:
    """Autocast casts a weight for activations that have its dtype already."""
    def program() -> None:
        mesh = weft.init_mesh({"dp": 2})
        layers: Any = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64, bias=False))
        weft.distribute_module(layers, mesh)
        optimizer = torch.optim.SGD(layers.parameters(), foreach=False)
        for _ in range(2):
            x = weft.distribute_tensor(torch.randn(512, 8), mesh, P("dp"))
            with torch.autocast("cpu", torch.bfloat16):
                out = layers(x)
            assert out.dtype is torch.bfloat16
            out.float().exp().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    real = weft.testing.run(lambda mesh: second_step(program), mesh={"dp": 2})
    assert weft.dry_run(lambda mesh: program(), {"dp": 2}).memory.peak == real[0].peak


def test_grouped_heads_fused_optimizers_and_tensors_that_stay_on_the_cpu() -> None:
    def program() -> None:
        mesh = weft.init_mesh({"dp": 2})
        made: Any = nn.Linear(8, 8 * 8).to("cpu")
        weft.distribute_module(made, mesh, shardings={"*": P("dp")})
        made.to(torch.device("cpu"))
        optimizer = torch.optim.AdamW(made.parameters(), fused=True)
        kept = {}
        for _ in range(2):
            x = torch.randn(4, 16, 8).to("cpu").cpu()
            heads = made(weft.distribute_tensor(x, mesh, P("dp"))).unflatten(-1, (8, 8))
            q, k, v = heads.transpose(1, 2).split((4, 2, 2), 1)
            F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept = {name: one.detach().cpu() for name, one in made.named_parameters()}
        assert kept

    real = weft.testing.run(lambda mesh: second_step(program), mesh={"dp": 2})
    dry = weft.dry_run(lambda mesh: program(), {"dp": 2})
    assert [facts(event) for event in dry.log.events] == real[0].events
    assert dry.memory.peak == real[0].peak


CASTS: dict[str, Any] = {
    "linear": lambda x, y: F.linear(x, x),
    "exp": lambda x, y: y.exp(),
    "softmax": lambda x, y: y.softmax(-1),
    "sum": lambda x, y: y.sum(0),
    "layer_norm": lambda x, y: F.layer_norm(y, (8,)),
    "gelu": lambda x, y: F.gelu(y),
    "cat": lambda x, y: torch.cat([x, y]),
    "mse_loss": lambda x, y: F.mse_loss(y, y),
    "grid_sample": lambda x, y: F.grid_sample(  # a fake one of CUDA needs CUDA
        y[None, None], x.view(1, 4, 8, 2), align_corners=True),
}


def test_autocast_has_the_list_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's has ops that the CPU's has not, and is known without a GPU."""
    def found(device: str) -> list[torch.dtype]:
        dtypes: list[torch.dtype] = []

        def program(mesh: Any) -> None:
            x = weft.ones(8, 8, mesh=mesh, spec=P("x"))
            y = x.bfloat16()
            with torch.autocast(device, torch.bfloat16):
                dtypes.extend(op(x, y).dtype for op in CASTS.values())

        weft.dry_run(program, {"x": 2})
        return dtypes

    def due(device: str) -> list[torch.dtype]:
        with FakeTensorMode(), torch.autocast(device, torch.bfloat16):
            x = torch.ones(8, 8, device=device)
            y = x.bfloat16()
            return [op(x, y).dtype for name, op in CASTS.items() if name != "grid_sample"]

    dtypes = {device: found(device) for device in ("cpu", "cuda")}
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    for device in dtypes:
        assert dtypes[device] == [*due(device), torch.float32], device
    assert due("cpu") != due("cuda")


def test_mixed_precision_on_an_accelerator_is_there() -> None:
    """torch turns it off where there is none, and a step would cost twice as much."""
    dtypes = []

    def program(kind: str) -> None:
        mesh = weft.init_mesh({"dp": 2}, kind)
        torch.cuda.set_device(0)
        model: Any = nn.Linear(32, 32).to(kind)
        weft.distribute_module(model, mesh, shardings={"*": P("dp")})
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        scaler = torch.amp.GradScaler(kind)
        for _ in range(2):
            x = weft.distribute_tensor(torch.randn(64, 32, device=kind), mesh, P("dp"))
            with torch.autocast(device_type=kind, dtype=torch.bfloat16):
                out = model(x)
            scaler.scale(out.float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            torch.cuda.reset_peak_memory_stats()
        with torch.autocast(kind):
            dtypes.append((out.dtype, model(x).dtype))

    cpu, cuda = (weft.dry_run(lambda mesh, kind=kind: program(kind), {"dp": 2}, steps=None)
                 for kind in ("cpu", "cuda"))
    assert [*map(facts, cpu.log.events)] == [*map(facts, cuda.log.events)] and cpu.log.events
    assert cpu.memory == cuda.memory
    assert dtypes == [(torch.bfloat16,) * 2, (torch.bfloat16, torch.float16)]


def test_lengths_and_bins_that_data_decide() -> None:
    """All elements are different; bins are as many as are asked for; lengths fit."""
    def program(mesh: Any) -> None:
        for x in (weft.randn(8, 2, mesh=mesh, placements=P("dp")), torch.randn(8, 2)):
            assert x.unique().shape == x.unique_consecutive().shape == (16,)
            for bins in ([3, 4], [torch.arange(4.0), torch.arange(5.0)]):
                counts, borders = torch.histogramdd(x, bins)
                assert counts.shape == (3, 4) and [len(one) for one in borders] == [4, 5]
            lengths = x.abs().sum(1).long()
            assert torch.segment_reduce(x, "sum", lengths=lengths).shape == (8, 2)
        z = weft.randn(8, 5, 6, mesh=mesh, placements=P("dp"), dtype=torch.complex64)
        assert torch.fft.hfftn(z).shape == (8, 5, 10)  # a conjugate moves
        assert z.conj().data.shape == z.conj().imag.data.shape == z.shape
        x = torch.randn(10, 8, 5, requires_grad=True)
        targets = torch.randint(1, 5, (8, 4))
        lengths: Any = [10] * 8, [4] * 8
        F.ctc_loss(x.log_softmax(2), targets, *lengths).backward()
        assert x.grad is not None

    weft.dry_run(program, {"dp": 4}, steps=None)


def test_packed_sequences() -> None:
    """Lengths that are known count, others are those of the longest."""
    def program(mesh: Any) -> None:
        model = nn.LSTM(3, 4, batch_first=True)
        lengths = [5, 5, 4, 3, 3, 2, 1, 1]
        for x in (torch.randn(8, 5, 3), weft.randn(8, 5, 3, mesh=mesh, placements=P())):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            assert packed.data.shape == (24, 3) and packed.batch_sizes.tolist() == [8, 6, 5, 3, 2]
            out, found = nn.utils.rnn.pad_packed_sequence(model(packed)[0], True, 0.0, 6)
            assert out.shape == (8, 6, 4) and found.tolist() == lengths
            out.sum().backward()
            unknown = x.abs().sum((1, 2)).long()
            packed = nn.utils.rnn.pack_padded_sequence(x.exp(), unknown, True, False)
            assert packed.data.shape == (40, 3)
        with pytest.raises((RuntimeError, ValueError), match="total_length"):
            packed = nn.utils.rnn.pack_padded_sequence(torch.randn(8, 5, 3), lengths, True)
            nn.utils.rnn.pad_packed_sequence(packed, total_length=4)

    weft.dry_run(program, {"dp": 4}, steps=None)


@pytest.mark.parametrize("index, spec", [
    (slice(0, 32), P("x")), (3, P(None)), ((slice(None), 3), P("x")), (..., P("x")),
], ids=str)
def test_a_write_takes_no_memory_of_the_whole(index: Any, spec: P) -> None:
    def program(mesh: Any) -> Any:
        x = weft.ones(64, 128, mesh=mesh, placements=P("x"))
        shape = torch.empty(64, 128, device="meta")[index].shape
        x[index] = weft.ones(shape, mesh=mesh, placements=spec)
        return x

    def measured(mesh: Any) -> int:
        with peak_memory() as real:
            program(mesh)
        return real.peak

    for rank, due in enumerate(weft.testing.run(measured, mesh={"x": 4})):
        assert weft.dry_run(program, {"x": 4}, rank=rank).memory.peak == due
