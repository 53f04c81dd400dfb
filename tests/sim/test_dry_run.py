"""A dry run: devices, values, steps, meshes, refusals; and the command."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft import P
from weft.cli.main import main
from weft.errors import MeshError, ShardTypeError


def train(mesh: Any, steps: int = 3) -> None:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(),
                                     torch.nn.Linear(16, 8))
    weft.distribute_module(model, mesh, shardings={
        "0.weight": P("tp"), "0.bias": P("tp"), "2.weight": P(None, "tp")})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        x = weft.distribute_tensor(torch.randn(32, 8), mesh, P("dp"))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_last_step_counts() -> None:
    found = weft.dry_run(train, {"dp": 4, "tp": 2}, "h100")
    parameters = 4 * (8 * 8 + 8 + 8 * 8 + 8)
    assert found.memory.parameters == parameters
    assert found.memory.gradients == parameters + 4  # reduced together with the loss
    assert found.memory.state == 2 * parameters + 4 * 4  # and the steps' counts
    assert found.log.by_axis_and_op()[("tp",), "aten.square.default"] == 8 * 8 * 4
    assert found.nbytes == 8 * 8 * 4 + 2 * parameters * 3 // 4 + 2 * 4  # the loss, rounded up
    # Forward and backward, but for the gradient of the input, which nobody wants.
    assert found.flops == 2 * 8 * (2 * 8 * 8 + 3 * 8 * 8)
    assert found.log.seconds == pytest.approx(found.seconds)
    assert 0 < found.seconds < 1e-3
    assert found.step == 2
    assert weft.dry_run(lambda mesh: train(mesh, 1), {"dp": 4, "tp": 2}).step == 0
    assert repr(found).startswith(f"DryRun(rank {found.rank} of ") and len(repr(found)) < 80
    text = str(found)
    assert text.startswith("rank 0 of 8 (dp=4, tp=2), step 2\n  parameters")
    assert "\nby module\n" in text and max(map(len, text.splitlines())) <= 80


def test_meshes_of_the_program_have_the_sizes_that_are_asked_for() -> None:
    seen = []

    def program(mesh: Any) -> None:
        other = weft.init_mesh({"tp": 2, "dp": 2})
        seen.append((other.axis_sizes, other.size(), mesh.rank, weft.init_mesh((4,)).size()))
        x = torch.zeros(64, 8, device="cuda").cuda().to("cuda:0")
        y = weft.distribute_tensor(x, other, P("dp"))
        seen.append((tuple(y.to_local().shape), y.to_local().is_meta))

    weft.dry_run(program, {"dp": 32, "tp": 4}, rank=5)
    assert seen == [((4, 32), 128, 5, 4), ((2, 8), True)]
    assert weft.comm.this_world().size == 1


def test_what_follows_from_constants_can_be_read() -> None:
    seen: list[Any] = []

    def program(mesh: Any) -> None:
        mask = weft.distribute_tensor(torch.ones(8, 4, dtype=torch.bool), mesh, P("x"))
        seen.append(bool(mask.all()))
        seen.append((torch.arange(4) * 2).tolist())
        unknown = torch.empty(3)
        known = torch.zeros(3)
        known.add_(unknown)  # no more
        seen.append((unknown.sum().item(), known[0].item(), torch.tensor([3, 4]).max().item()))
        seen.append(torch.tensor([0, 2, 0, 5]).nonzero().shape)
        seen.append((unknown.tolist(), unknown.numpy()[0], f"{unknown[0]:.1f} {known.min():.0f}"))

    weft.dry_run(program, {"x": 4}, reads=7)
    assert seen[:-1] == [True, [0, 2, 4, 6], (7.0, 7.0, 4), (2, 1)]
    assert seen[-1] == ([7.0] * 3, 7.0, "7.0 7")
    assert torch.zeros(2).device.type == "cpu" and torch.tensor([1]).item() == 1


def test_masks_select_as_many_elements_on_other_ranks() -> None:
    """Where blocks of a mask are exchanged, and of one that data decide, too."""
    seen: list[Any] = []

    def program(mesh: Any) -> None:
        x = weft.zeros(9, 4, mesh=mesh, placements=P("x"))
        chosen = torch.nn.functional.one_hot(x.topk(2).indices, 4).permute(2, 1, 0)
        seen.append(sum(len(torch.where(one)[0]) for one in chosen))  # rows travel to 2 of 3 ranks
        unknown = x.sin() > torch.empty(4)
        x[unknown] = x[unknown] * 2
        seen.append(x[unknown].shape)
        seen.append(x[weft.arange(9, mesh=mesh, placements=P("x")).full_tensor() < 4, 0].shape)

    weft.dry_run(program, {"x": 4})
    assert 9 <= seen[0] <= 36 and seen[1:] == [(36,), (9,)]  # 18, any, 4 in a run


def test_deep_copies_keep_what_is_known() -> None:
    """An average of a model is a deep copy: of buffers, too, whose values are known."""
    seen: list[list[float]] = []

    def program(mesh: Any) -> None:
        model = weft.distribute_module(nn.BatchNorm1d(4), mesh)
        mean = copy.deepcopy(model)
        assert mean.running_var.sharding == model.running_var.sharding
        count = torch.zeros(2)
        known = copy.deepcopy(count)
        count.add_(torch.empty(2))
        lost = copy.deepcopy(count)
        known.add_(1)
        seen.extend([known.tolist(), lost.tolist(), mean.running_var.tolist()])

    weft.dry_run(program, {"x": 2}, reads=7)
    assert seen == [[1.0, 1.0], [7.0, 7.0], [1.0] * 4]


@pytest.mark.parametrize("way", ["with", "text"])
def test_a_model_on_the_meta_device_takes_no_memory(way: str) -> None:
    def program(mesh: Any) -> None:
        with torch.device("meta") if way == "with" else nullcontext():
            device: Any = {"device": "meta"} if way == "text" else {}
            model = torch.nn.Linear(256, 256, **device).to(torch.bfloat16)
        weft.distribute_module(model, mesh, shardings={"*": P("x")})
        weft.nn.materialize(model)
        plain = torch.zeros(8, device=model.weight.device)  # that of a tensor is the real one
        model.weight.sum()
        del plain

    found = weft.dry_run(program, {"x": 64})
    assert found.memory.peak_overall < 256 * 256 * 2 / 8
    whole = weft.dry_run(lambda mesh: torch.nn.Linear(256, 256), {"x": 64})
    assert whole.memory.peak_overall >= 256 * 256 * 4


def test_whether_it_fits_and_what_to_change() -> None:
    def program(mesh: Any, width: int, shardings: dict[str, P]) -> None:
        with torch.device("meta"):
            model: Any = torch.nn.Linear(width, width, bias=False)
        weft.distribute_module(model, mesh, shardings=shardings)
        weft.nn.materialize(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            x = weft.ones(64, width, mesh=mesh, spec=P("dp"))
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def said(width: int, shardings: dict[str, P], device: str | None) -> str:
        return str(weft.dry_run(lambda mesh: program(mesh, width, shardings), {"dp": 64},
                                device=device))

    large = said(80_000, {}, "h100")
    assert ("\nmemory: too much for the 80 GB of one H100, 192% of them used\n"
            "  temporary tensors of the optimizer are ") in large, large
    assert "  less: foreach=False, or shard parameters over more axes\n" in large
    assert "\n  temporary, in the optimizer " in large
    small = said(20_000, {"*": P("dp")}, "h100")
    assert "\nmemory: fits into the 80 GB of one H100, 4% of them used\n" in small, small
    assert "\nseconds: " in small and "more samples a rank, or fewer ranks along dp" in small
    assert max(map(len, large.splitlines() + small.splitlines())) <= 80
    assert "\nmemory: " in said(64, {}, None)
    with pytest.raises(ShardTypeError, match="'h1000' is no device"):
        said(8, {}, "h1000")


def test_an_op_without_a_meta_kernel() -> None:
    """torch has none of the gradient of ctc_loss."""
    seen: list[Any] = []

    def program(mesh: Any) -> None:
        x = weft.zeros(5, 2, 3, mesh=mesh, placements=P(None, "x"), requires_grad=True)
        nn.functional.ctc_loss(x.log_softmax(2), torch.ones(2, 2).long(), torch.tensor([5, 5]),
                               torch.tensor([2, 1])).backward()
        seen.append(x.grad.sharding)

    weft.dry_run(program, {"x": 2})
    assert str(seen[0]) == "[5, 2@x, 3]"


def test_attention_makes_no_scores() -> None:
    def program(mesh: Any) -> None:
        q = weft.distribute_tensor(torch.zeros(4, 8, 512, 16), mesh, P("x"))
        q.requires_grad_()
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

    found = weft.dry_run(program, {"x": 4})
    scores = 8 * 512 * 512 * 4
    assert found.memory.peak_overall < scores + 4 * 8 * 512 * 16 * 4
    assert found.flops == 7 * 2 * 8 * 512 * 512 * 16


def test_attention_on_a_rank_without_heads() -> None:
    """torch would divide by their number; and a program without steps has one peak."""
    def program(mesh: Any) -> None:
        q = weft.ones(1, 4, 1, 8, mesh=mesh, spec=P(None, "x"))
        k = weft.ones(1, 2, 6, 8, mesh=mesh, spec=P(None, None, None, "x"))
        torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    found = weft.dry_run(program, {"x": 4}, rank=1)
    assert found.memory.peak == found.memory.peak_overall
    assert "peak of the program" in str(found) and "peak of the step" not in str(found)


def test_seconds_of_computation_follow_from_rates() -> None:
    """Arithmetic or memory, whichever takes longer, and the call; collectives are none of it."""
    def program(mesh: Any) -> None:
        x = weft.distribute_tensor(torch.empty(64, 32), mesh, P("x"))
        w = weft.distribute_tensor(torch.empty(32, 8), mesh, P())
        start = x @ w
        (start + 1).sum().full_tensor()

    local = 16 * 32, 32 * 8, 16 * 8  # elements
    free = weft.dry_run(program, {"x": 4}, compute=weft.Compute(1e30, 1e30))
    assert free.compute_seconds == pytest.approx(0, abs=1e-20)
    assert free.step_seconds == pytest.approx(free.seconds)
    assert weft.dry_run(program, {"x": 4}).compute_seconds is None
    arithmetic = weft.dry_run(program, {"x": 4}, compute=weft.Compute(1e6, 1e30))
    assert arithmetic.compute_seconds == pytest.approx(2 * 16 * 32 * 8 / 1e6)
    memory = weft.dry_run(program, {"x": 4}, compute=weft.Compute(1e30, 1e6))
    own = 2 * sum(local[:2])  # each rank takes a copy of its part
    assert memory.compute_seconds == pytest.approx(4 * (own + sum(local) + 3 * 16 * 8 + 1) / 1e6)
    calls = weft.dry_run(program, {"x": 4}, compute=weft.Compute(1e30, 1e30, 1.0))
    assert calls.compute_seconds == pytest.approx(2 + 3)
    assert "\n  computation, estimated                 5 s\n" in str(calls)
    assert "\n  collectives, estimated (gloo) " in str(calls)
    mine = weft.Links(weft.Link(1e-5, 1e-9), weft.Link(1e-5, 1e-9))
    assert "\n  collectives, estimated  " in str(weft.dry_run(program, {"x": 4}, mine))


def test_rates_are_measured_and_the_same_on_all_ranks() -> None:
    found = weft.testing.run(lambda mesh: weft.measure_compute(mesh, num_rounds=1), 2)
    assert found[0] == found[1] and found[0].call_s > 0
    with pytest.raises(ShardTypeError, match=r"(?s)flops_per_s is 0, call_s is -1.*at least 1 in"):
        weft.Compute(0, 1e9, -1)
    with pytest.raises(ShardTypeError, match="num_rounds is 0"):
        weft.testing.run(lambda mesh: weft.measure_compute(mesh, num_rounds=0), 2)


def test_errors_of_the_program_pass_and_arguments_are_checked() -> None:
    def fails(mesh: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        weft.dry_run(fails, (2,))
    with pytest.raises(IndexError) as caught:
        weft.dry_run(lambda mesh: [][int(torch.empty(()).item())], (2,))
    assert "1 reads had 0.0 instead" in caught.value.__notes__[0]
    with pytest.raises(MeshError, match="has 2 ranks"):
        weft.dry_run(train, (2,), rank=2)
    with pytest.raises(ShardTypeError, match="a step or more"):
        weft.dry_run(train, (2,), steps=0)
    with pytest.raises(ShardTypeError, match=r"links are weft\.Links or one of gloo, nccl, a100"):
        weft.dry_run(train, (2,), "h1000")


def test_one_run_for_each_class_of_ranks() -> None:
    def program(mesh: Any) -> None:
        x = weft.distribute_tensor(torch.zeros(5, 8), mesh, P("x"))
        x.sum().full_tensor()

    found = weft.dry_classes(program, {"dp": 16, "x": 4})
    assert [one.rank for one in found] == [0, 2, 3]  # two rows, one, and none
    peaks = [one.memory.peak for one in found]
    assert peaks[0] > peaks[1] > peaks[2]
    assert len(weft.dry_classes(program, {"dp": 2, "x": 5})) == 1
    named = weft.dry_classes(program, {"dp": 2, "x": 4}, "h100", ranks=range(8), steps=None)
    assert [one.rank for one in named] == [0, 2, 3]


def test_nothing_is_written_and_nobody_waited_for(tmp_path: Path) -> None:
    """As scripts do beside their steps: checkpoints must not lose their data to a dry run."""
    path, other = tmp_path / "model.pt", tmp_path / "folder"
    torch.save({"weight": torch.ones(4)}, path)
    before, save = path.read_bytes(), torch.save

    def program(mesh: Any) -> None:
        distributed.init_process_group("gloo")
        assert (distributed.get_rank(), distributed.get_world_size()) == (3, 8)
        torch.cuda.set_device(3)
        model = torch.nn.Linear(4, 4).cuda()
        weft.distribute_module(model, mesh, shardings={"weight": P("x")})
        assert torch.load(path)["weight"].is_meta
        for batch in DataLoader(TensorDataset(torch.arange(16.0).view(4, 4)), batch_size=2):
            batch = [one.pin_memory().to("cuda", non_blocking=True) for one in batch]
            loss = model(batch[0]).mean()
            assert loss.item() == 0
            loss.backward()
        torch.save(model.state_dict(), path)
        checkpoint.save(model.state_dict(), checkpoint_id=other)
        distributed.barrier()
        distributed.destroy_process_group()

    weft.dry_run(program, {"x": 8}, rank=3)
    assert path.read_bytes() == before and not other.exists() and torch.save is save


def test_the_command(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", ["weft"])
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, weft\n"
        "mesh = weft.init_mesh({'dp': 2})\n"
        "x = weft.distribute_tensor(torch.ones(64, 4), mesh, weft.P('dp'))\n"
        "print(sys.argv[1:], mesh.size(), x.sum().item())\n")
    done = CliRunner().invoke(main, ["dry", "--mesh", "dp=64", str(script), "--lr", "3"])
    lines = done.output.splitlines()
    assert lines[:2] == ["['--lr', '3'] 64 256.0", "rank 0 of 64 (dp=64), the program"], done
    assert not done.stderr
    assert any("train.py:4" in line for line in lines)
    done = CliRunner().invoke(main, ["dry", "--mesh", "tp=64", str(script)])
    assert done.stderr == (f"{script} makes Mesh(dp=2), and no mesh with the axes of --mesh tp=64: "
                           "what follows is about its own.\n\n")
    assert "rank 0 of 2 (dp=2), the program" in done.output.splitlines()
    script.write_text(script.read_text().replace("64, 4", "65, 4") + "import os\n"
                      "print(os.environ['RANK'])\n")
    trace = tmp_path / "run.json"
    done = CliRunner().invoke(
        main, ["dry", "--mesh", "dp=64", "--classes", "--trace", str(trace), str(script)])
    said = done.output.splitlines()
    assert said[1:6:2] == ["0", "32", "63"]
    heads = [line for line in said if line.startswith("rank ")]
    assert heads == [f"rank {rank} of 64 (dp=64), the program" for rank in (0, 32, 63)], done
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 32, 63}
    timed = [event for event in events if event["ph"] == "X"]
    assert timed and {event["ph"] for event in events} <= {"X", "M"}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 and event["name"] for event in timed)


def test_evaluation_in_inference_mode() -> None:
    """There operations arrive whole that are made of others: item, conv2d, linear."""
    def evaluate(mode: Any) -> Any:
        def program(mesh: Any) -> None:
            model = weft.distribute_module(
                nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 5)), mesh)
            x = weft.ones(4, 2, 6, 6, mesh=mesh, placements=P("dp"))
            with mode():
                seen.append(model(x).softmax(-1).max(-1).values.mean().item())

        found = weft.dry_run(program, {"dp": 2})
        return found.memory.peak, found.flops, [str(one) for one in found.log.events]

    seen: list[float] = []
    peak, flops, events = evaluate(torch.no_grad)
    assert evaluate(torch.inference_mode) == (peak, flops, events) and flops and seen == [0.0, 0.0]


ENDS = {
    "sys.exit(0)": (0, "rank 0 of 64 (dp=64), the program"),
    "sys.exit(3)": (3, ""),
    "f(mesh)": (1, """\
Traceback (most recent call last; frames of weft and torch with WEFT_DEBUG=1):
  File "{0}", line 5, in <module>
    f(mesh)
  File "{0}", line 4, in f
    def f(mesh): weft.ones(4, mesh=mesh, spec=weft.P("tp"))
weft.errors.MeshError: weft.ones(placements=P('tp')): 'tp' is no axis of Mesh(dp=64)."""),
    "f(": (1, """\
  File "{0}", line 5
    f(
     ^
SyntaxError: '(' was never closed"""),
}


@pytest.mark.parametrize("end", ENDS)
def test_how_a_script_ends(end: str, tmp_path: Path, monkeypatch: Any) -> None:
    """A script's own mistakes are shown with its own lines, as `weft run` shows them."""
    monkeypatch.setattr("sys.argv", ["weft"])
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    monkeypatch.delenv("WEFT_DEBUG", raising=False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    script = tmp_path / "train.py"
    script.write_text("import sys, weft\nmesh = weft.init_mesh({'dp': 64})\n\n"
                      f'def f(mesh): weft.ones(4, mesh=mesh, spec=weft.P("tp"))\n{end}\n')
    done = CliRunner().invoke(main, ["dry", "--mesh", "dp=64", str(script)])
    code, told = ENDS[end]
    assert done.exit_code == code
    assert done.output.startswith(told.format(script)), done.output


@pytest.mark.parametrize(("options", "told"), [
    (["--trace", "no where/a.json"], "there is no folder 'no where'"),
    (["--links", "a.json"], "File 'a.json' does not exist"),
])
def test_files_are_looked_for_before_the_script_runs(options: list[str], told: str) -> None:
    done = CliRunner().invoke(main, ["dry", "--mesh", "dp=64", *options, __file__])
    assert done.exit_code == 2 and told in done.output


def test_positions_that_a_large_batch_shares_are_known() -> None:
    """Values of 4 million elements, of which 4,096 are stored, as of a causal mask."""
    seen: list[Any] = []

    def program(mesh: Any) -> None:
        positions = torch.arange(4096)[None].expand(1024, -1)
        before = torch.cat([positions[:, :1] - 1, positions], 1)
        jumps = ((before[:, 1:] - before[:, :-1]) != 1).cumsum(-1)
        seen.append(bool((jumps[:, -1] == 0).all()))
        seen.append(int((positions + positions[0])[7, 5]))
        seen.append(int(positions.sum(0)[3]))  # depends on the number of samples: unknown
        seen.append(int(positions.cumsum(0)[2, 3]))  # differs from sample to sample: unknown

    weft.dry_run(program, {"dp": 2}, reads=-1.0)
    assert seen == [True, 10, -1, -1]


def test_large_values_are_neither_drawn_nor_written_for_one_sample() -> None:
    seen: list[Any] = []

    def program(mesh: Any) -> None:
        before = torch.default_generator.get_state()
        torch.rand(1024, 2048)
        seen.append(torch.equal(torch.default_generator.get_state(), before))
        table = torch.arange(2048).expand(1024, -1) + 1
        seen.append(int(table[1, 0]))
        table[0].fill_(7)  # one row is kept for all: what they hold now is not known
        seen.append(int(table[1, 0]))

    weft.dry_run(program, {"dp": 2}, reads=-1.0)
    assert seen == [True, 1, -1]
