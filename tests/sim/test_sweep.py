"""The sweep over torch's database: a fixed sample of it, and that it finds what is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import weft
from tests.oracle import same
from tests.sweep.board import page, scoreboard
from tests.sweep.journal import Found, Journal
from tests.sweep.judge import Dense, Verdict, dense, judge
from tests.sweep.samples import UNWRITTEN, LeftOut, Sample, samples_of
from tests.sweep.ways import WAYS, laid_out
from weft import P

OPS = {
    **dict.fromkeys(("addmv", "cumsum", "nn.functional.linear", "std", "where", "index_add",
                     "masked_select", "tensor_split", "masked.std", "unfold"), torch.float64),
    "unravel_index": torch.int64, "to": torch.int64,
}


@pytest.fixture(scope="module")
def rows() -> Sample:
    return Sample("0", lambda own: own[0] * own[1], (torch.rand(4, 3), torch.rand(4, 3)),
                  (True, False))


def verdict(sample: Sample, expected: Dense, way: str = "rows") -> str:
    found = judge(sample, expected, way, "planted")
    assert found is not None
    return found.kind


def test_it_finds_wrong_values_gradients_shapes_and_dtypes(rows: Sample) -> None:
    expected = dense(rows)
    assert verdict(rows, expected) == "right"
    (result,), (gradient, _) = expected.results, expected.gradients
    assert gradient is not None
    for wrong in (result + 1e-3, result[:3], result.double(), result.flip(0)):
        assert verdict(rows, Dense([wrong], expected.gradients)) == "wrong"
    for wrong in (gradient * 2, None):
        assert verdict(rows, Dense([result], [wrong, None])) == "wrong"


Planted = Callable[[list[torch.Tensor]], object]
PLANTED: dict[str, tuple[Planted, Planted]] = {
    "a list for a tuple": (lambda own: (own[0] * 2,), lambda own: [own[0] * 2]),
    "no gradient": (lambda own: (own[0] * 2, own[0] * 3),
                    lambda own: (own[0] * 2, own[0].detach() * 3)),
    "strides": (lambda own: own[0] * 2, lambda own: (own[0] * 2).t().contiguous().t()),
    "a write to an operand": (lambda own: own[1] * 2, lambda own: own[1].mul_(2).clone()),
    "no write to an operand": (lambda own: own[1].mul_(2).clone(), lambda own: own[1] * 2),
    "NaN": (lambda own: own[0] * 2, lambda own: own[0] * 2 + torch.tensor([0, float("nan"), 0])),
    "another dtype": (lambda own: own[0] * 2, lambda own: own[0].double() * 2),
}
"""What the plain call does, and what a wrong library would do on ShardTensors."""


@pytest.mark.parametrize("fault", PLANTED)
def test_it_finds_planted_faults(fault: str) -> None:
    right, wrong = PLANTED[fault]
    tensors = (torch.rand(4, 3), torch.rand(4, 3))
    sample = Sample("0", right, tensors, (True, False))
    expected = dense(sample)
    assert verdict(sample, expected) == "right"
    assert verdict(dataclasses.replace(sample, fn=wrong), expected) == "wrong"


def test_it_finds_ranks_that_wait_for_each_other() -> None:
    def one_rank_gathers(own: list[torch.Tensor]) -> torch.Tensor:
        if not isinstance(own[0], weft.ShardTensor) or own[0].to_local().shape[0] == 2:
            return own[0] * 2
        return own[0].full_tensor() * 2

    sample = Sample("0", one_rank_gathers, (torch.rand(5, 3), torch.rand(4, 3)), (True, False))
    assert verdict(sample, dense(sample), "uneven") == "hang"


def test_it_finds_a_call_that_gives_something_else_when_repeated() -> None:
    calls: list[int] = []

    def fn(own: list[torch.Tensor]) -> torch.Tensor:
        calls.append(0)
        return own[0] * (2 if len(calls) < 5 else 3)  # twice plain, then once on two ranks

    sample = Sample("0", fn, (torch.rand(4, 3),), (False,))
    assert verdict(sample, dense(sample)) == "wrong"


def test_it_tells_what_is_left_whole() -> None:
    """A result that is gathered counts; one that is small, sharded or a partial value does not."""
    def gathers(own: list[torch.Tensor]) -> torch.Tensor:
        one = own[0]
        return (one.redistribute(placements=P()) if isinstance(one, weft.ShardTensor) else one) * 2

    programs: dict[str, tuple[Callable[[list[torch.Tensor]], torch.Tensor], bool]] = {
        "gathers": (gathers, True), "stays": (lambda own: own[0] * 2, False),
        "small": (lambda own: own[0].var(0), False),
        "partial": (lambda own: own[0].t() @ own[0], False),
    }
    for name, (fn, whole) in programs.items():
        sample = Sample("0", fn, (torch.rand(6, 4),), (False,))
        found = judge(sample, dense(sample), "rows", "planted")
        assert found is not None and (found.kind, found.whole) == ("right", whole), name


def test_turned_operands_and_written_targets() -> None:
    for variant in ("turned", "inplace", "out"):
        (sample,) = samples_of("add", torch.float64, 1, variant)
        expected = dense(sample)
        found = {way: verdict(sample, expected, way) for way in ("rows", "uneven", "partial")}
        assert set(found.values()) == {"right"}, found
    turned = next(samples_of("mul", torch.float64, 1, "turned"))
    lies = turned.tensors[0].stride()
    assert lies == tuple(sorted(lies))
    # `as_strided` reads memory as that of the global tensor.
    wide = next(one for one in samples_of("as_strided_copy", torch.float64, 3, "turned"))
    assert verdict(wide, dense(wide)) == "right"


@pytest.mark.parametrize("name", UNWRITTEN)
@pytest.mark.filterwarnings("ignore::weft.WeftWarning")
def test_a_target_that_torch_forgets_is_to_be_written(name: str) -> None:
    for sample in samples_of(name, torch.float64, 6, "out"):
        def forgets(own: list[torch.Tensor], fn: Planted = sample.fn) -> object:
            out, same = cast(Any, fn(own))
            return torch.full_like(out, 1), same

        expected = dense(sample)
        assert verdict(sample, expected) in ("right", "gathered")
        assert verdict(dataclasses.replace(sample, fn=forgets), expected) == "wrong"


@pytest.mark.parametrize("name", [
    "narrow_copy", "copysign", "floor_divide", "view_copy", "renorm", "nn.functional.pixel_shuffle",
    "native_batch_norm", "nn.functional.batch_norm",
])
@pytest.mark.filterwarnings("ignore::weft.WeftWarning")
def test_results_lie_in_memory_as_those_of_torch(name: str) -> None:
    for sample in samples_of(name, torch.float64, 2, "turned"):
        expected = dense(sample)
        for way in ("rows", "ragged"):
            assert verdict(sample, expected, way) in ("right", "gathered")


def test_samples_that_are_not_run_say_why() -> None:
    reasons: list[str] = []
    assert list(samples_of("ones", torch.float64, 2, left_out=reasons)) == []
    assert reasons == ["it takes no tensor"]


def test_it_finds_more_bytes_than_the_family_may_receive() -> None:
    x = torch.rand(4, 3, dtype=torch.float64)

    def found(fn: Callable[[torch.Tensor], object], what: str, way: str = "rows") -> Verdict:
        sample = Sample("0", lambda own: fn(own[0]), (x,), (True,))
        expected = dense(sample)
        one = judge(sample, expected, way, what)
        assert one is not None
        return one

    def gathers(one: torch.Tensor) -> torch.Tensor:
        mine = one if type(one) is torch.Tensor else one.redistribute(placements=weft.P())
        return mine.abs()

    assert found(torch.Tensor.abs, "abs 0").nbytes == (0, 0)
    assert found(gathers, "abs 0") == Verdict(
        "costly", "received (48, 0), allowed (0, 0)", (48, 0), (0, 0), True)
    assert found(gathers, "matrix_exp 0").kind == "right"
    # What is true of all blocks takes a byte of each, and no more.
    assert found(lambda one: torch.equal(one, one * 1), "equal 0").kind == "right"
    assert found(lambda one: torch.equal(gathers(one), one.abs()), "equal 0").kind == "costly"
    # What is searched may come whole, what is searched for may not.
    line = torch.arange(3.0, dtype=torch.float64)
    assert found(lambda one: torch.bucketize(one, line), "bucketize 0").kind == "right"
    assert found(lambda one: torch.bucketize(gathers(one), line), "bucketize 0").kind == "costly"
    # What a partial operand costs is due to its layout.
    assert found(torch.Tensor.abs, "abs 0", "partial").kind == "right"


def test_narrow_floats_may_differ_as_far_as_they_round() -> None:
    sizes = torch.linspace(-1, 1, 64).bfloat16()
    sample = Sample("0", lambda own: (own[0] * 3).sum(), (sizes + 1,), (False,))
    expected = dense(sample)
    (result,), ((close,), _) = expected.results, expected.close(2)
    assert close is not None and 3 * 192 * 2**-9 <= close <= 3 * 192 * 2**-6
    for off, kind in ((0.0, "right"), (close / 2, "right"), (close * 1.5, "wrong")):
        assert verdict(sample, Dense([result + off], [None], expected.rounding)) == kind
    # Terms that cancel are rounded as large as they are.
    cancels = dataclasses.replace(sample, fn=lambda own: own[0].sum(), tensors=(sizes,))
    of_terms = dense(cancels)
    assert abs(of_terms.results[0]) < 0.1
    assert of_terms.close(2)[0][0] >= 3 * 30 * 2**-9  # type: ignore[operator]
    # What takes element by element rounds no sum, and small elements by themselves.
    alone = dense(dataclasses.replace(sample, fn=lambda own: own[0] * 3, adds=False))
    (small, *_), large = alone.results[0][:2], alone.results[0].max()
    assert small < 1e-6 < large
    off = torch.zeros(64, dtype=torch.bfloat16)
    off[1] = alone.results[0][1] / 16
    for extra, kind in ((off * 0, "right"), (off, "wrong")):
        due = dataclasses.replace(alone, results=[alone.results[0] + extra])
        assert verdict(dataclasses.replace(sample, fn=lambda own: own[0] * 3), due) == kind


def test_a_part_may_be_larger_than_the_sum_and_infinite() -> None:
    """Terms of a gradient may have both signs where those of absolute values have one; beyond the
    largest number of a dtype a part is infinite, and what is within it is still looked at."""
    x = torch.tensor([-40.0, -40.0, -8.0, 1.0]).half()
    first = Sample("0", lambda own: torch.nn.functional.prelu(own[0], own[1]),
                   (x, torch.tensor(0.5).half()), (False, True))
    close = dense(first).close(4)[1][1]
    most = 2 * 88  # a cotangent is at most 2
    assert isinstance(close, float) and 5 * 40 * 2**-11 <= close <= 5 * 2 * most * 2**-11

    def scaled(own: list[torch.Tensor]) -> torch.Tensor:
        return (own[0].double() * own[1].double()).sum()

    x = torch.tensor([[6e4, 1.0], [6e4, 2.0], [-6e4, 3.0]]).half()
    beyond = Sample("0", lambda own: scaled(own) * 1e3, (x, torch.ones(2).half()), (False, True))
    close = dense(beyond).close(3)[1][1]
    assert isinstance(close, torch.Tensor) and (close < 0).tolist() == [True, False]
    due = torch.tensor([6e4, 6e3]).half()
    for made, fits in (([torch.inf, 6e3], True), ([torch.nan, 6e3], True), ([6e4, 6e3], True),
                       ([0.0, 6e3], False), ([6e4, torch.nan], False)):
        allowed = torch.tensor([-100.0, 100.0])
        with nullcontext() if fits else pytest.raises(AssertionError, match="are off"):
            same(torch.tensor(made).half(), due, "sum", allowed)
    inside = dataclasses.replace(beyond, fn=scaled, tensors=(x / 8, torch.ones(2).half()))
    close = dense(inside).close(3)[1][1]
    assert isinstance(close, float) and close <= 4 * 2 * (22500 + 7500) * 2**-11


def test_what_a_narrow_operand_makes_of_a_wide_one_is_rounded_as_narrow() -> None:
    weights = torch.rand(16, generator=torch.Generator().manual_seed(0))
    x = torch.rand(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cov = Sample("0", lambda own: own[0].cov(aweights=own[1]), (x, weights), (False, False))
    close = dense(cov).close(4)[0][0]
    assert isinstance(close, float) and 1e-10 < close < 1e-6
    wide = dataclasses.replace(cov, tensors=(x, weights.double()))
    assert dense(wide).close(4)[0][0] is None
    truth = dataclasses.replace(cov, fn=lambda own: own[0] > own[1])
    assert dense(truth).close(4)[0] == [None]


def test_a_sample_that_torch_rounds_less_than_others_by_chance() -> None:
    first = next(one for one in samples_of("softmax", torch.float32, 6) if one.name == "1")
    expected = dense(first)
    assert verdict(first, expected) == "right"
    (gradient,) = expected.gradients
    assert gradient is not None
    off = dataclasses.replace(expected, gradients=[gradient + 4e-6])
    assert verdict(first, off) == "wrong"


def test_what_torch_itself_gets_wrong_in_a_narrow_dtype_is_left_out() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    sample = Sample("0", lambda own: torch.renorm(own[0], torch.inf, 0, 0.5), (x,), (True,))
    with pytest.raises(LeftOut, match="in double precision it is not"):
        dense(sample)
    dense(dataclasses.replace(sample, tensors=(x.to(torch.complex128),)))
    roots = dataclasses.replace(sample, fn=lambda own: (own[0] * 0).sqrt() * 0)
    assert dense(roots).gradients[0] is not None  # NaN in any precision, and due


def test_each_call_that_gathers_counts_as_gathered() -> None:
    x = torch.rand(4, 4, dtype=torch.float64)
    y = torch.rand(2, dtype=torch.float64)
    sample = Sample("0", lambda own: torch.as_strided_scatter(own[0], own[1], (2,), (1,)), (x, y),
                    (True, False))
    expected = dense(sample)
    assert {verdict(sample, expected) for _ in range(2)} == {"gathered"}


def test_it_tells_refusals_from_other_errors(rows: Sample) -> None:
    expected = dense(rows)

    def raising(own: list[torch.Tensor]) -> torch.Tensor:
        raise KeyError("of the test")

    refused = dataclasses.replace(rows, fn=lambda own: own[0].as_strided((2,), (1,)))
    assert verdict(refused, expected) == "refused"
    assert verdict(dataclasses.replace(rows, fn=raising), expected) == "unclear"
    by_chance = dataclasses.replace(rows, fn=lambda own: torch.randint(0, 1, (1,)))
    with pytest.raises(LeftOut, match="draws random numbers"):
        dense(by_chance)


def test_places_of_equal_elements_may_differ() -> None:
    x = torch.tensor([1, 0, 1, 0, 2])

    def found(places: list[int], op: str = "argsort") -> str:
        sample = Sample("0", lambda given: given[0] * 0 + torch.tensor(places), (x,), (False,))
        one = judge(sample, Dense([torch.tensor([1, 3, 0, 2, 4])], [None]), "rows", f"{op} 0")
        assert one is not None
        return one.kind

    assert found([3, 1, 2, 0, 4]) == "right"
    assert found([3, 1, 2, 0, 4], "add") == "wrong"
    assert found([3, 1, 2, 4, 0]) == "wrong" and found([3, 3, 2, 0, 4]) == "wrong"
    assert found([3, 1, 2, 0, 5]) == "wrong"


def test_gradients_of_equal_elements_may_be_exchanged() -> None:
    x = torch.tensor([1.0, 0.0, 1.0, 2.0])

    def found(gradient: list[float], op: str = "msort") -> str:
        weights = torch.tensor([3.0, 5.0, 7.0, 9.0])
        sample = Sample("0", lambda given: (given[0] * weights).sum(), (x,), (True,))
        due = dense(sample)
        assert due.gradients[0] is not None
        scale = due.gradients[0][0] / 3
        due = dataclasses.replace(due, gradients=[torch.tensor(gradient) * scale])
        one = judge(sample, due, "rows", f"{op} 0")
        assert one is not None
        return one.kind

    assert found([3.0, 5.0, 7.0, 9.0]) == "right" and found([7.0, 5.0, 3.0, 9.0]) == "right"
    assert found([7.0, 5.0, 3.0, 9.0], "add") == "wrong"
    assert found([5.0, 3.0, 7.0, 9.0]) == "wrong"


def test_ways_differ() -> None:
    tensors = (torch.rand(4, 3), torch.rand(3))
    texts = {way: [str(placed[0]), *map(str, placed[1])]
             for way in WAYS if (placed := laid_out(way, tensors))}
    assert "middle" not in texts and len({*map(str, texts.values())}) == len(texts)
    assert texts["ragged"] == ["Mesh(x=3)", "[4@x{3,0,1}, 3]", "[3@x{2,0,1}]"]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.filterwarnings("ignore::weft.WeftWarning")
def test_a_fixed_sample(name: str) -> None:
    for sample in samples_of(name, OPS[name], 2):
        expected = dense(sample)
        for way in WAYS:
            found = judge(sample, expected, way, f"{name} {sample.name} {way}")
            assert found is None or found.kind in ("right", "gathered"), found


def test_the_journal_keeps_what_was_done(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "found.jsonl")
    one = Found("weft", "add", "float64", "", "0", "rows", "wrong", "by 1")
    for found in (one, dataclasses.replace(one, op="mul", kind="right")):
        journal.add(found)
    journal.finish(("weft", "add", "float64", ""))
    journal.add(dataclasses.replace(one, kind="right"))
    assert journal.done() == {("weft", "add", "float64", "")}
    assert {found.kind for found in journal.found()} == {"right"}
    assert "`add` (1: float64; rows): by 1" in scoreboard([one])
    whole = [dataclasses.replace(one, kind="right", way=way, whole=way == "last")
             for way in ("rows", "last")]
    assert "- `add`: last 1/1\n" in scoreboard(whole) and "left whole" not in scoreboard(
        whole[:1]).partition("##")[2]
    journal.begin("abc")
    journal.leave_out(("weft", "ones", "float64", ""), "it takes no tensor")
    journal.finish(("weft", "ones", "float64", ""))
    assert journal.codes() == {("weft", "add", "float64", ""): "",
                               ("weft", "ones", "float64", ""): "abc"}
    text = page(journal.found(), journal.left_out(), journal.codes())
    assert "- it takes no tensor: `ones`" in text and "| abc, unknown |" in text
