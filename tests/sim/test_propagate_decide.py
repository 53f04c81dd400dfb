"""Which layouts a call's operands come to, and why: one line a case, read as it is printed."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.rule_of import rule_of
from weft.core import AxisName, Layout, Mesh, P
from weft.ops import find
from weft.propagate import decide
from weft.rules import Call, Decision, TensorArg, bind, parse
from weft.tensor.trace.calls import call_of, overload_named

MESH = Mesh({"dp": 2, "tp": 2})
SUM: dict[AxisName, str] = {"tp": "sum"}


def tensor(*shape: int, dtype: str = "float32") -> TensorArg:
    return TensorArg(shape, dtype)


def call(op: str, *args: object, result: Sequence[int], dtype: str = "float32") -> Call:
    overload = overload_named(f"aten.{op}")
    assert overload is not None
    return call_of(overload, args, {}, (TensorArg(tuple(result), dtype),))


def decided(made: Call, layouts: Sequence[Layout], grad: bool = True) -> Decision:
    found = rule_of(made, layouts)
    assert found is not None
    if isinstance(found, Decision):
        return found
    return decide(found, made, layouts, [grad] * len(layouts))


def shown(made: Call, specs: Sequence[P], grad: bool = True, mesh: Mesh = MESH) -> str:
    layouts = [Layout(mesh, arg.shape, spec) for arg, spec in zip(made.tensors, specs)]
    decision = decided(made, layouts, grad)
    operands = " ".join(map(str, decision.operands))
    return f"{operands} -> {' '.join(map(str, decision.results))}"


LINEAR = call("linear.default", tensor(6, 9, 8), tensor(10, 8), tensor(10), result=(6, 9, 10))
ADD = call("add.Tensor", tensor(6, 8), tensor(6, 8), result=(6, 8))
BIAS = call("add.Tensor", tensor(6, 8), tensor(8), result=(6, 8))
MUL = call("mul.Tensor", tensor(6, 8), tensor(6, 8), result=(6, 8))
SOFTMAX = call("softmax.int", tensor(6, 64), 1, result=(6, 64))
VIEW = call("view.default", tensor(6, 20), [6, 5, 4], result=(6, 5, 4))

FFT = call("_fft_c2c.default", tensor(2, 3, 8, 8, dtype="complex64"), [2, 3], 0, True,
           result=(2, 3, 8, 8), dtype="complex64")
CHOLESKY = call("linalg_cholesky.default", tensor(3, 6, 6), result=(3, 6, 6))

CONV = call("conv2d.default", tensor(1, 8, 64, 64), tensor(8, 8, 3, 3), None, [1, 1], [1, 1],
            result=(1, 8, 64, 64))
FAR = call("conv2d.default", tensor(1, 8, 8, 8), tensor(1, 8, 5, 5), None, [1, 1], [2, 2],
           result=(1, 1, 8, 8))

CASES = {
    "a convolution keeps rows and gathers its weight": (
        CONV, [P(None, None, ("dp", "tp")), P("tp")],
        "[1, 8, 64@(dp,tp), 64] [8, 8, 3, 3] -> [1, 8, 64@(dp,tp), 64]"),
    "a halo that is most of the field gives way to channels": (
        FAR, [P(None, None, "dp"), P(None, "dp")],
        "[1, 8@dp, 8, 8] [1, 8@dp, 5, 5] -> [1, 1, 8, 8] partial(sum@dp)"),
    "a batch of one sample a rank is not sharded again": (
        FFT, [P("dp", None, "tp")], "[2@dp, 3@tp, 8, 8] -> [2@dp, 3@tp, 8, 8]"),
    "nor is a batch that would leave empty shards": (
        CHOLESKY, [P("dp", "tp")], "[3@dp, 6, 6] -> [3@dp, 6, 6]"),
    "nothing sharded": (
        LINEAR, [P(), P(), P()], "[6, 9, 8] [10, 8] [10] -> [6, 9, 10]"),
    "batch": (
        LINEAR, [P("dp"), P(), P()], "[6@dp, 9, 8] [10, 8] [10] -> [6@dp, 9, 10]"),
    "batch and columns": (
        LINEAR, [P("dp"), P("tp"), P("tp")],
        "[6@dp, 9, 8] [10@tp, 8] [10@tp] -> [6@dp, 9, 10@tp]"),
    "a plain bias is cut with its weight": (
        LINEAR, [P("dp"), P("tp"), P()],
        "[6@dp, 9, 8] [10@tp, 8] [10@tp] -> [6@dp, 9, 10@tp]"),
    "a bias joins a contraction as one term": (
        LINEAR, [P("dp", None, "tp"), P(None, "tp"), P()],
        "[6@dp, 9, 8@tp] [10, 8@tp] [10] partial(sum@tp) -> [6@dp, 9, 10] partial(sum@tp)"),
    "terms that a bias meets are summed before they are more": (
        LINEAR, [P(partial=SUM), P(), P()], "[6, 9, 8] [10, 8] [10] -> [6, 9, 10]"),
    "two terms": (
        ADD, [P(partial=SUM), P(partial=SUM)],
        "[6, 8] partial(sum@tp) [6, 8] partial(sum@tp) -> [6, 8] partial(sum@tp)"),
    "a finished value finishes a partial one": (
        ADD, [P(partial=SUM), P()], "[6, 8] [6, 8] -> [6, 8]"),
    "a finished value finishes terms, however small it is": (
        BIAS, [P(partial=SUM), P()], "[6, 8] [8] -> [6, 8]"),
    "a partial one is scattered to a sharded one": (
        ADD, [P(partial=SUM), P("tp")], "[6@tp, 8] [6@tp, 8] -> [6@tp, 8]"),
    "a product takes terms of one side": (
        MUL, [P(partial=SUM), P()],
        "[6, 8] partial(sum@tp) [6, 8] -> [6, 8] partial(sum@tp)"),
    "but not of both": (
        MUL, [P(partial=SUM), P(partial=SUM)], "[6, 8] [6, 8] -> [6, 8]"),
    "other kinds do not pass": (
        MUL, [P(partial={"tp": "max"}), P()], "[6, 8] [6, 8] -> [6, 8]"),
    "a replicated operand is sliced": (
        ADD, [P("tp"), P()], "[6@tp, 8] [6@tp, 8] -> [6@tp, 8]"),
    "two orders of axes agree on one": (
        ADD, [P(("tp", "dp")), P(("dp", "tp"))],
        "[6@(tp,dp), 8] [6@(tp,dp), 8] -> [6@(tp,dp), 8]"),
    "an axis on two dims": (
        ADD, [P("tp"), P(None, "tp")], "[6@tp, 8] [6@tp, 8] -> [6@tp, 8]"),
    "heads come to their borders": (
        VIEW, [P(None, "tp")], "[6, 20@tp{12,8}] -> [6, 5@tp, 4]"),
    "views pass any terms": (
        VIEW, [P(partial={"tp": "max"})],
        "[6, 20] partial(max@tp) -> [6, 5, 4] partial(max@tp)"),
    "a pad stays at home": (
        call("constant_pad_nd.default", tensor(6, 8), [1, 1], result=(6, 10)), [P(None, "tp")],
        "[6, 8@tp] -> [6, 10@tp]"),
    "unless one shard would have nearly all": (
        call("constant_pad_nd.default", tensor(6, 8), [0, 24], result=(6, 32)), [P(None, "tp")],
        "[6, 8@tp{8,0}] -> [6, 32@tp]"),
    "columns of flattened positions become rows, not channels": (
        call("flatten.using_ints", tensor(8, 6, 6), 1, 2, result=(8, 36)), [P(None, "dp", "tp")],
        "[8, 6@(dp,tp), 6] -> [8, 36@(dp,tp){12,6,12,6}]"),
    "a weight is sliced for what is sharded": (
        call("einsum.default", "bx,iox->box", [tensor(1, 8), tensor(8, 8, 8)], result=(1, 8, 8)),
        [P(None, "tp"), P()], "[1, 8@tp] [8, 8, 8@tp] -> [1, 8, 8@tp]"),
    "features come together rather than leave terms of all": (
        LINEAR, [P(None, None, "tp"), P(), P()],
        "[6@tp, 9, 8] [10, 8] [10] -> [6@tp, 9, 10]"),
    "a dim of size 1 that is cut comes to whole": (
        call("add.Tensor", tensor(6, 1), tensor(6, 8), result=(6, 8)), [P(None, "tp"), P("dp")],
        "[6@(dp,tp), 1] [6@(dp,tp), 8] -> [6@(dp,tp), 8]"),
    "a maximum with a gradient needs its dim whole": (
        call("amax.default", tensor(6, 8), [1], result=(6,)), [P(None, "tp")],
        "[6@tp, 8] -> [6@tp]"),
    "a sum over a cut dim": (
        call("sum.dim_IntList", tensor(6, 8), [1], result=(6,)), [P("dp", "tp")],
        "[6@dp, 8@tp] -> [6@dp] partial(sum@tp)"),
    "x + 1 needs the sum": (
        call("add.Tensor", tensor(6, 8), 1, result=(6, 8)), [P(partial=SUM)], "[6, 8] -> [6, 8]"),
    "integer terms do not become floats": (
        call("to.dtype", tensor(6, 8, dtype="int64"), "float32", result=(6, 8)),
        [P(partial=SUM)], "[6, 8] -> [6, 8]"),
}


@pytest.mark.parametrize("name", CASES)
def test_decisions(name: str) -> None:
    made, specs, expected = CASES[name]
    assert shown(made, specs) == expected


def test_a_maximum_without_gradient_stays() -> None:
    made = call("amax.default", tensor(6, 8), [1], result=(6,))
    entry, layout = find(made.op), Layout(MESH, (6, 8), P(None, "tp"))
    assert entry is not None
    rule, *_ = entry.covering(made, [False])
    decision = decide(rule, made, [layout], [False])
    assert decision.operands[0] is layout
    assert str(decision.results[0]) == "[6] partial(max@tp)"


def test_of_two_axes_that_leave_empty_shards_one_stays() -> None:
    assert shown(FFT, [P(("dp", "tp"))]) == "[2@dp, 3, 8, 8] -> [2@dp, 3, 8, 8]"


def test_blocks_that_follow_each_other_are_joined_and_split() -> None:
    """One sample a rank and sharded rows; several samples a rank come to samples instead."""
    joined = call("view.default", tensor(2, 6, 4), [12, 4], result=(12, 4))
    apart = call("unflatten.int", tensor(12, 4), 0, [2, 6], result=(2, 6, 4))
    several = call("view.default", tensor(4, 6, 4), [24, 4], result=(24, 4))
    assert shown(joined, [P("dp", "tp")]) == "[2@dp, 6@tp, 4] -> [12@(dp,tp), 4]"
    assert shown(apart, [P(("dp", "tp"))]) == "[12@(dp,tp), 4] -> [2@dp, 6@tp, 4]"
    assert shown(several, [P("dp", "tp")]) == "[4@(dp,tp), 6, 4] -> [24@(dp,tp), 4]"


def test_many_ranks_exchange_rather_than_gather() -> None:
    mesh = Mesh({"dp": 1, "tp": 8})
    assert shown(SOFTMAX, [P(None, "tp")], mesh=mesh) == "[6@tp, 64] -> [6@tp, 64]"


@pytest.mark.parametrize("ranks, width", [(4, 3), (3, 3), (2, 4), (8, 8), (8, 64)])
def test_all_pairs_are_sharded_by_points(ranks: int, width: int) -> None:
    """Coordinates would move fewer bytes, but are summed next, or leave ranks idle."""
    mesh = Mesh({"dp": 1, "tp": ranks})
    made = call(
        "sub.Tensor", tensor(102, 1, width), tensor(1, 102, width), result=(102, 102, width))
    assert shown(made, [P("tp"), P(None, "tp")], mesh=mesh) == (
        f"[102@tp, 1, {width}] [1, 102, {width}] -> [102@tp, 102, {width}]"
    )


def test_a_partial_value_is_sharded_where_no_rank_is_idle() -> None:
    """A batch of 2 would leave half of the ranks without elements, for the same bytes."""
    mesh = Mesh({"dp": 1, "tp": 4})
    made = call("relu.default", tensor(2, 16, 32), result=(2, 16, 32))
    assert shown(made, [P(partial=SUM)], grad=False, mesh=mesh) == (
        "[2, 16@tp, 32] -> [2, 16@tp, 32]"
    )


def test_sharded_weights_are_gathered_rather_than_contracted_anew() -> None:
    """Cutting x along the contraction moves less, but leaves a large result of terms."""
    mesh = Mesh({"dp": 8, "tp": 1})
    made = call("linear.default", tensor(2048, 512), tensor(512, 512), result=(2048, 512))
    assert shown(made, [P("dp"), P(None, "dp")], mesh=mesh) == (
        "[2048@dp, 512] [512, 512] -> [2048@dp, 512]"
    )


def test_an_axis_of_size_one_is_an_axis_like_any_other() -> None:
    """The layouts that a program reads do not depend on the sizes of the axes."""
    sizes = ({"dp": 1, "tp": 1}, {"dp": 1, "tp": 2}, {"dp": 2, "tp": 1}, {"dp": 2, "tp": 2})
    for name, (made, specs, _) in CASES.items():
        seen = {re.sub(r"\{.*?\}", "", shown(made, specs, mesh=Mesh(size))) for size in sizes}
        assert len(seen) == 1, name  # but for cuts


def test_an_operand_that_agrees_keeps_its_very_layout() -> None:
    layouts = [Layout(MESH, (6, 8), P("dp"), sizes={0: (1, 5)})] * 2
    decision = decided(ADD, layouts)
    assert all(now is before for now, before in zip(decision.operands, layouts))
    assert decision.results[0] == layouts[0]


def test_the_larger_operand_keeps_its_cuts() -> None:
    made = call("add.Tensor", tensor(6, 8), tensor(6, 1), result=(6, 8))
    small = Layout(MESH, (6, 1), P("dp"), sizes={0: (2, 4)})
    large = Layout(MESH, (6, 8), P("dp"), sizes={0: (1, 5)})
    decision = decided(made, [large, small])
    assert [layout.sizes_of(0) for layout in decision.operands] == [(1, 5), (1, 5)]


def test_an_axis_that_leaves_and_one_that_joins_keep_the_other_cuts() -> None:
    made = call("softmax.int", tensor(7, 9), 1, result=(7, 9))
    ragged = Layout(MESH, (7, 9), P("dp", "tp"), sizes={0: (2, 5)})
    layout = decided(made, [ragged]).operands[0]
    assert layout.dims[0][0] == 0
    assert layout.cuts_of(0)[:: 2 if len(layout.dims[0]) == 2 else 1] == (0, 2, 7)


def test_local_arguments_of_a_view() -> None:
    layout = Layout(MESH, (6, 20), P("dp", "tp"))
    decision = decided(VIEW, [layout])
    assert decision.args is not None
    sizes = {at: decision.args(at)[0][1] for at in itertools.product(range(2), range(2))}
    assert sizes == {(0, 0): [3, 3, 4], (0, 1): [3, 2, 4], (1, 0): [3, 3, 4], (1, 1): [3, 2, 4]}


def test_reasons() -> None:
    layouts = [Layout(MESH, arg.shape, spec) for arg, spec in zip(
        LINEAR.tensors, [P("dp"), P(), P()])]
    assert decided(LINEAR, layouts).reason() == "dp shards d0"
    layouts = [Layout(MESH, (6, 8), P(partial=SUM))] * 2
    assert decided(ADD, layouts).reason() == "tp passes partial(sum)"
    assert decided(ADD, [Layout(MESH, (6, 8))] * 2).reason() == "every axis is replicated"


def test_two_kinds_of_terms_never_meet_in_one_layout() -> None:
    rule = bind(parse("a, b:max -> a"), [(4,), (6,)], [(4,)], linear=((0,),))
    made = Call("test.op", (tensor(4), tensor(6)), {}, (tensor(4),))
    layouts = [Layout(MESH, (4,), P(partial={"dp": "sum"})), Layout(MESH, (6,), P("tp"))]
    decision = decide(rule, made, layouts, [False, False])
    assert {kind for kind in decision.results[0].partial if kind} in ({"sum"}, {"max"})


@pytest.mark.parametrize("mark, expected", [("~", "[8]"), ("~:max", "[8@tp]")])
def test_partial_values_are_scattered_for_a_kernel_that_leaves_some(
    mark: str, expected: str
) -> None:
    rule = bind(parse(f"s{mark} ->"), [(8,)], [()])
    made = Call("test.op", (tensor(8),), {}, (tensor(),))
    decision = decide(rule, made, [Layout(MESH, (8,), P(partial=SUM))], [False])
    assert str(decision.operands[0]) == expected


def test_every_process_breaks_ties_alike() -> None:
    """Ranks decide by themselves, so nothing may depend on the order of a set of strings."""
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.sim.test_propagate_decide import CASES, shown\n"
        "print([shown(made, specs) for made, specs, _ in CASES.values()])"
    )
    outputs = {
        str([shown(made, specs) for made, specs, _ in CASES.values()]) + "\n",
        *(subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed, "PYTHONPATH": "src"},
            capture_output=True, text=True, check=True,
        ).stdout for seed in ("1", "2")),
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(("text", "operands"), [
    ("...~:sum, ...~:sum -> ", "[6@tp, 8] [6@tp, 8] -> [] partial(sum@tp)"),
    ("...~, ...~ -> ", "[6, 8] [6, 8] -> []"),
])
def test_what_has_to_move_is_sharded_for_a_kernel_that_leaves_partial_values(
    text: str, operands: str
) -> None:
    made = call("mse_loss.default", tensor(6, 8), tensor(6, 8), 1, result=())
    layouts = [Layout(MESH, (6, 8), P(partial=SUM)), Layout(MESH, (6, 8), P())]
    found = decide(bind(parse(text), [(6, 8)] * 2, [()]), made, layouts, [False, False])
    assert f"{found.operands[0]} {found.operands[1]} -> {found.results[0]}" == operands
