"""What torch refuses is refused in torch's words, with layouts and without weft's frames."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from weft import P

X = torch.ones(4, 6)

CALLS: dict[str, tuple[Any, str]] = {
    "matmul": (lambda x, y: x @ y, "__matmul__ of f32[4@x, 6], f32[4, 6]"),
    "linear": (lambda x, y: F.linear(x, torch.ones(3, 5)),
               "linear of f32[4@x, 6], plain f32[3, 5]"),
    "add": (lambda x, y: x + y[:3], "__add__ of f32[4@x, 6], f32[3, 6]"),
    "cat": (lambda x, y: torch.cat([x, y[:, :2]]), "cat of f32[4@x, 6], f32[4, 2]"),
    "view": (lambda x, y: x.view(5, 5), "view of f32[4@x, 6]"),
    "layer_norm": (lambda x, y: F.layer_norm(x, (5,)), "layer_norm of f32[4@x, 6]"),
    "conv": (lambda x, y: F.conv1d(x[None], torch.ones(2, 3, 1)),
             "conv1d of f32[1, 4@x, 6], plain f32[2, 3, 1]"),
    "sum": (lambda x, y: x.sum(3), "sum of f32[4@x, 6]"),
    "many": (lambda x, y: torch.stack([x] * 9 + [y[0]]),
             f"stack of {', '.join(['f32[4@x, 6]'] * 8)}, ..."),
}


@pytest.mark.parametrize("name", CALLS)
def test_layouts_are_shown_and_inner_frames_are_not(name: str) -> None:
    call, said = CALLS[name]
    with pytest.raises((RuntimeError, IndexError)) as plain:
        call(X, X)

    def on_rank(mesh: Any) -> None:
        x, y = weft.distribute_tensor(X, mesh, P("x")), weft.distribute_tensor(X, mesh, P())
        for _ in range(2):
            with pytest.raises(plain.type) as told:
                call(x, y)
            assert not isinstance(told.value, weft.WeftError)
            assert told.value.__notes__ == [f"  in {said} on Mesh({{'x': 2}})"]
            files = [frame.filename for frame in traceback.extract_tb(told.tb)]
            inner = [file for file in files if "/weft/" in file]
            assert len(inner) <= 4
            assert "_meta_registrations" not in "".join(files)
            assert told.value.__suppress_context__

    weft.testing.run(on_rank, mesh={"x": 2})


def test_a_shard_that_is_taken_for_the_whole_is_suspected() -> None:
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(torch.ones(5, 6), mesh, P("x"))
        with pytest.raises(RuntimeError) as told:
            x + torch.ones(3 - mesh.rank, 6)
        assert told.value.__notes__[0].splitlines()[1:] == [
            "  a plain tensor counts as whole, on every rank; if this one is a rank's shard: "
            "weft.ShardTensor.from_local(x, mesh, P('x'))"]
        with pytest.raises(RuntimeError) as told:
            x + torch.ones(3, 5)
        assert len(told.value.__notes__[0].splitlines()) == 1

    weft.testing.run(on_rank, mesh={"x": 2})


def test_a_model_without_data_is_told_how_it_gets_some() -> None:
    def on_rank(mesh: Any) -> None:
        with torch.device("meta"):
            model = torch.nn.Linear(6, 4)
        weft.distribute_module(model, mesh, shardings={"weight": P("x")})
        x = weft.distribute_tensor(torch.ones(5, 6), mesh, P())
        with pytest.raises(RuntimeError) as told:
            model(x)
        assert told.value.__notes__[0].splitlines()[1:] == [
            "  parameters of the meta device have no data: weft.nn.materialize(model), "
            "after weft.distribute_module"]
        assert weft.nn.materialize(model)(x).shape == (5, 4)

    weft.testing.run(on_rank, mesh={"x": 2})


def test_frames_of_a_users_own_function_stay() -> None:
    def scaled(x: torch.Tensor, by: int) -> torch.Tensor:
        return deeper(x) * by

    def deeper(x: torch.Tensor) -> torch.Tensor:
        return x.view(5, 5)

    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(X, mesh, P("x"))
        with pytest.raises(RuntimeError) as told:
            scaled(x, 2)
        assert "deeper" in [frame.name for frame in traceback.extract_tb(told.tb)]

    weft.register_rule(scaled, "a b! -> a b!")
    try:
        weft.testing.run(on_rank, mesh={"x": 2})
    finally:
        weft.unregister_rule(scaled)


def test_debug_mode_keeps_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.comm.PROCESS.on", True)

    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(X, mesh, P("x"))
        with pytest.raises(RuntimeError) as told:
            x @ x
        assert any("trace/capture" in f.filename for f in traceback.extract_tb(told.tb))

    weft.testing.run(on_rank, mesh={"x": 1})


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


_attention: Any = F.scaled_dot_product_attention

MISFITS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "reflect": (lambda x: F.pad(x, (7, 0), mode="reflect"), (1, 4, 7)),
    "kernel": (lambda x: F.conv1d(x, _zeros(4, 4, 12), padding=1), (1, 4, 7)),
    "channels": (lambda x: F.conv1d(x, _zeros(4, 3, 2)), (1, 4, 7)),
    "groups": (lambda x: F.conv1d(x, _zeros(5, 2, 2), groups=2), (1, 4, 7)),
    "channels of a transpose": (lambda x: F.conv_transpose1d(x, _zeros(5, 2, 2)), (1, 4, 7)),
    "channel of a transpose": (lambda x: F.conv_transpose1d(x, _zeros(5, 2, 2)), (1, 1, 7)),
    "output padding": (
        lambda x: F.conv_transpose1d(x, _zeros(4, 2, 2), output_padding=2), (1, 4, 7)),
    "integers": (lambda x: x.long().std(1), (1, 4, 7)),
    "stride": (lambda x: F.conv1d(x, _zeros(5, 4, 2), stride=-1), (1, 4, 7)),
    "padding of a transpose": (
        lambda x: F.conv_transpose1d(x, _zeros(4, 2, 2), padding=-1), (1, 4, 7)),
    "bias": (lambda x: F.conv_transpose1d(x, _zeros(4, 2, 2), _zeros(1)), (1, 4, 7)),
    "weight": (lambda x: F.conv1d(x, _zeros(4, 4, 2, 2)), (1, 4, 7)),
    "dim": (lambda x: x.softmax(5), (1, 4, 7)),
    "integers of a softmax": (lambda x: x.int().softmax(2), (1, 4, 7)),
    "negative output padding": (
        lambda x: F.conv_transpose1d(x, _zeros(4, 2, 2), output_padding=-1), (1, 4, 7)),
    "complex bias": (
        lambda x: F.conv_transpose1d(x, _zeros(4, 2, 2), _zeros(2).cfloat()), (1, 4, 7)),
    "floats as places": (lambda x: x.index_select(2, _zeros(3)), (1, 4, 1)),
    "places of index_reduce": (
        lambda x: x.index_reduce(2, torch.tensor(0), _zeros(1, 4, 3), "amax"), (1, 4, 7)),
    "floats of index_reduce": (
        lambda x: x.index_reduce(2, _zeros(3), _zeros(1, 4, 3), "amax"), (1, 4, 7)),
    "dims of addmm": (lambda x: torch.addmm(_zeros(1, 4, 3), x[0], _zeros(7, 3)), (1, 4, 7)),
    "minlength": (lambda x: x[0, 0].long().bincount(minlength=-2), (1, 4, 7)),
    "targets": (lambda x: F.multi_margin_loss(x[0], torch.zeros(4).int()), (1, 4, 7)),
    "floats as rows": (lambda x: F.embedding_bag(x[0], _zeros(3, 2)), (1, 4, 7)),
    "integers of a pool": (lambda x: F.avg_pool2d(x.int(), 2), (1, 4, 2)),
    "bools of a pool": (lambda x: F.max_pool2d(x.bool(), 2), (1, 4, 2)),
    "integers of a resize": (lambda x: F.interpolate(x.int(), scale_factor=2), (1, 4, 7)),
    "integers of columns": (lambda x: F.unfold(x.int(), 2), (1, 4, 7, 2)),
    "floats as places of an unpool": (lambda x: F.max_unpool1d(x, _zeros(1, 4, 7), [2]), (1, 4, 7)),
    "integers of an unpool": (
        lambda x: F.max_unpool1d(x.int(), torch.zeros(x.shape).long(), [2]), (1, 4, 7)),
    "integers of blocks": (lambda x: F.fold(x.int(), 3, 2), (1, 4, 4)),
    "pool": (lambda x: F.avg_pool1d(x, 9), (1, 4, 7)),
    "columns": (lambda x: F.unfold(x, 9), (1, 4, 7, 7)),
    "grid": (lambda x: F.grid_sample(x, _zeros(2, 4, 4, 2)), (1, 4, 7, 7)),
    "mask": (lambda x: _attention(x, x, x, attn_mask=_zeros(6, 7)), (1, 4, 7, 7)),
    "batch of masks": (lambda x: _attention(x, x, x, attn_mask=_zeros(3, 4, 7, 7)), (1, 4, 7, 7)),
    "heads": (lambda x: _attention(x, x[:, :3], x[:, :3], enable_gqa=True), (1, 4, 7, 7)),
    "dim of unique": (lambda x: x[0, 0].unique(dim=1), (1, 4, 7)),
    "several numbers": (lambda x: x.item(), (1, 4, 7)),
    "several truths": (bool, (1, 4, 7)),
    "no truth": (lambda x: bool(x[:0]), (1, 4, 7)),
    "several indices": (lambda x: [1, 2][x.long()], (1, 4, 7)),
    "roll": (lambda x: x.roll((1, 2), (2,)), (1, 4, 7)),
    "blocks of nothing": (lambda x: F.pixel_unshuffle(x, 2), (0, 4, 5)),
    "complex angles": (lambda x: torch.atan2(x.cfloat(), x.cfloat().mT), (1, 4, 4)),
    "bools of a product": (lambda x: torch.mv(x[0].mT.bool(), x[0, 0].bool()), (1, 4, 4)),
    "integers of a product": (lambda x: torch.mv(x[0].mT.int(), x[0, 0]), (1, 4, 4)),
    "integers of a transpose": (
        lambda x: F.conv_transpose1d(x.int(), _zeros(4, 2, 2).int(), padding=1), (1, 4, 7)),
    "mixed cross product": (lambda x: torch.linalg.cross(x.cfloat(), x), (1, 4, 3)),
    "dims of expand": (lambda x: x.expand(7), (1, 4, 7)),
    "dims of a resize": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (1, 4, 7)),
    "dims of a padding": (lambda x: F.pad(x, (1,) * 6, mode="reflect"), (1, 4, 7)),
    "no place of a resize": (
        lambda x: F.interpolate(x, (0, 3), mode="bilinear"), (1, 1, 4, 4)),
    "rows of variances": (
        lambda x: F.batch_norm(x, torch.ones(1, 4), torch.ones(4), training=True), (1, 4, 7)),
    "row of a native variance": (
        lambda x: torch.native_batch_norm(
            x, None, None, torch.ones(4), torch.ones(4, 1), True, 0.1, 0.1), (1, 4, 7)),
    "dims of targets": (lambda x: F.soft_margin_loss(x[0, 0], x[0]), (1, 4, 7)),
    "no reduction of segments": (
        lambda x: torch.segment_reduce(
            x[0, 0], "nonsense", lengths=torch.tensor([3, 4]), initial=0.5), (1, 4, 7)),
    "offsets that go back": (
        lambda x: torch.segment_reduce(x[0, 0], "prod", offsets=torch.tensor([0, 4, 2, 7])),
        (1, 4, 7)),
    "floats as labels": (
        lambda x: F.multilabel_margin_loss(x[0], x[0].double()), (1, 4, 7)),
    "values at places": (
        lambda x: x.index_put((None, None, torch.tensor([0, 2])), _zeros(3, 2)), (1, 4, 7)),
    "more dims at places": (
        lambda x: x[0].index_put((torch.tensor([0, 2]),), x[:, :2]), (1, 4, 7)),
    "integers of windows": (
        lambda x: torch.stft(x[0].int(), 3, 1, window=_zeros(3), return_complex=True), (1, 4, 7)),
}


@pytest.mark.parametrize("name", MISFITS)
def test_torchs_own_words_on_all_ranks_before_anything_is_sent(name: str) -> None:
    call, shape = MISFITS[name]
    with pytest.raises(Exception) as plain:
        call(_zeros(*shape))

    def on_rank(mesh: Any) -> int:
        x = weft.distribute_tensor(_zeros(*shape), mesh, P(None, None, "x"))
        with weft.explain() as log, pytest.raises(plain.type) as told:
            call(x)
        assert str(told.value) == str(plain.value)
        return len(log.events)

    assert weft.testing.run(on_rank, mesh={"x": 4}) == [0] * 4


def test_a_border_that_no_memory_holds_ends_at_once() -> None:
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(torch.ones(1, 4, 6), mesh, P(None, None, "x"))
        with pytest.raises(RuntimeError, match="allocate memory"):
            F.pad(x, (2**56, 2**56), mode="replicate")

    weft.testing.run(on_rank, mesh={"x": 2})


def _with_two(x: Any, mask: torch.Tensor) -> Any:
    x[mask] = torch.tensor([5.0, 6.0])
    return x


def test_what_data_decides_is_not_refused() -> None:
    """Of zeros, and of one element, kernels refuse some of these or warn."""
    calls = (
        lambda x: 6 // (x.long() + 1),
        lambda x: torch.linalg.inv(x[:, :2] + 1e-3),
        lambda x: x.double().std(1),
        lambda x: torch.stft(x.flatten(), 3, 1, window=torch.ones(3), return_complex=True),
        lambda x: torch._segment_reduce(x, "max", lengths=(x + 1).sum(1).long()[:1] - 2),
        lambda x: _with_two(x.clone(), torch.eye(2, 3) > 0),
        lambda x: _with_two(x.clone(), x > 0),
        lambda x: torch.histogram(x, x.sum(1).cumsum(0))[0],
        lambda x: x.repeat_interleave((x.sum(1) + 1).long(), 0, output_size=4),
        lambda x: torch.linalg.lu_solve(x[:, :2], x[0, :2].int() * 2 + x[1, :2].int() * 2, x),
    )

    def on_rank(mesh: Any) -> None:
        for call in calls:
            x = weft.distribute_tensor(torch.eye(2, 3), mesh, P("x"))
            torch.testing.assert_close(call(x).full_tensor(), call(torch.eye(2, 3)))

    weft.testing.run(on_rank, mesh={"x": 3})


_ROWS = torch.arange(24.0).reshape(6, 4)
_PLACES = torch.tensor([0, 1, 2, 3, 0, 99])

BEYOND: dict[str, Any] = {
    "index": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i.unsqueeze(1).expand(6, 4)),
    "index_put": lambda x, i: x.index_put((i,), x),
    "index_add": lambda x, i: x.index_add(0, i, x),
    "index_copy": lambda x, i: x.index_copy(0, i, x),
    "scatter": lambda x, i: x.scatter(0, i.unsqueeze(1).expand(6, 4), x),
    "max_unpool": lambda x, i: F.max_unpool2d(
        x.view(1, 6, 4), i.view(1, 6, 1).expand(1, 6, 4), [2, 2]),
    "nll_loss": lambda x, i: F.nll_loss(x, i),
    "cross_entropy": lambda x, i: F.cross_entropy(x, i, label_smoothing=0.1),
    "cross_entropy of weighted classes": lambda x, i: F.cross_entropy(x, i, torch.ones(4)),
}


@pytest.mark.parametrize("place", [P("x"), P()], ids=str)
@pytest.mark.parametrize("rows", [P("x", None), P(None, "x")], ids=str)
@pytest.mark.parametrize("name", BEYOND)
def test_an_index_out_of_bounds_is_an_error_on_all_ranks(name: str, rows: P, place: P) -> None:
    is_loss = "loss" in name or "entropy" in name
    if rows != P("x", None) and not is_loss:
        pytest.skip("whole rows are read where they are: only these ranks see the index")
    call = BEYOND[name]
    with pytest.raises(Exception, match=r"max index: 99|99 is out of bounds|out of range") as plain:
        call(_ROWS, _PLACES)

    def on_rank(mesh: Any) -> str:
        x, i = (weft.distribute_tensor(*both) for both in
                ((_ROWS, mesh, rows), (_PLACES, mesh, place)))
        with pytest.raises(plain.type, match=r"max index: 99|99 is out of bounds") as told:
            call(x, i)
        assert x.sum().item() == 276  # the ranks are still together
        return str(told.value)

    assert len(set(weft.testing.run(on_rank, mesh={"x": 3}))) == 1


@pytest.mark.parametrize("place", [P("x"), P()], ids=str)
def test_an_index_into_no_rows_is_an_error_on_all_ranks(place: P) -> None:
    """Also where one rank alone has indices."""
    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(torch.ones(0, 5), mesh, P("x"))
        i = weft.distribute_tensor(torch.tensor([0]), mesh, place)
        y = weft.distribute_tensor(torch.ones(1, 5), mesh, place)
        for call in (lambda: x[i], lambda: x.index_put((i,), y), lambda: x.index_copy(0, i, y)):
            with pytest.raises(IndexError, match="index 0 is out of bounds"):
                call()

    weft.testing.run(on_rank, mesh={"x": 3})


@pytest.mark.parametrize("place", [P("x"), P()], ids=str)
def test_negative_counts_are_an_error_beside_positive_ones(place: P) -> None:
    counts = torch.tensor([3, 1, 1, 1, 2, -1])

    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(_ROWS, mesh, P("x"))
        i = weft.distribute_tensor(counts, mesh, place)
        for call in (lambda: x.repeat_interleave(i, 0), lambda: torch.repeat_interleave(i)):
            with pytest.raises(RuntimeError, match="repeats can not be negative"):
                call()

    weft.testing.run(on_rank, mesh={"x": 2})


def test_weights_that_are_not_finite_are_no_error() -> None:
    weight = torch.tensor([1.0, float("inf"), 1.0, 1.0])
    due = F.cross_entropy(_ROWS, _PLACES.clamp(max=3), weight)

    def on_rank(mesh: Any) -> None:
        for rows in (P("x", None), P(None, "x")):
            x = weft.distribute_tensor(_ROWS, mesh, rows)
            found = F.cross_entropy(x, _PLACES.clamp(max=3), weight)
            torch.testing.assert_close(found.full_tensor(), due, equal_nan=True)

    weft.testing.run(on_rank, mesh={"x": 3})
