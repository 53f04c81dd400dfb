"""What a known structure gives for a new size is what a fresh build gives.

Every case runs on operands of several random sizes in one world, so that structures learnt from
one size serve the next. Each recipe that a structure gives is compared with one built afresh.
"""

from __future__ import annotations

import math
import random
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.cases import (
    EFFORT,
    Case,
    contraction,
    index,
    inplace,
    loss,
    norm,
    pointwise,
    reduction,
    view,
)
from tests.cases import attention as attention_cases
from tests.cases.layouts import layouts_of
from tests.effort import drawn
from tests.harness import flat, ranks
from weft import P, ShardTensor
from weft.core import Layout, Mesh
from weft.tensor.call import build, compose
from weft.tensor.call.program import Program, Step
from weft.tensor.call.sizes import known_for
from weft.tensor.keys import floats_of, structure_key
from weft.tensor.trace import capture
from weft.tensor.trace.trees import slots_of

FAMILIES = {
    "pointwise": pointwise, "reduction": reduction, "contraction": contraction, "view": view,
    "index": index, "norm": norm, "loss": loss, "attention": attention_cases, "inplace": inplace,
}
NUM_SIZES = 3
MESHES = ({"x": 3}, {"dp": 2, "tp": 2})


class Checker:
    """Stands for `build.recipe`: builds afresh what came from a structure, and compares."""

    def __init__(self) -> None:
        self.build = build.recipe
        self.num_compared = self.num_programs = 0

    def __call__(
        self, func: Any, args: Any, kwargs: Any, mesh: Any, key: Any, carry_out: Any, *more: Any
    ) -> Any:
        floats = floats_of((*args, *kwargs.values()))
        structure = key and structure_key(key, floats)
        known = structure is not None and known_for(mesh, structure) is not None
        made = self.build(func, args, kwargs, mesh, key, carry_out)
        if known:
            fresh = self.build(func, args, kwargs, mesh, None, carry_out)
            assert made[1] == fresh[1]
            assert described(made[0]) == described(fresh[0]), (func, mesh.here)
            self.num_compared += 1
            self.num_programs += isinstance(made[0], Program) and len(made[0].steps) > 1
        return made


def described(recipe: Any) -> Any:
    """All that a recipe does, as values."""
    if not isinstance(recipe, Program):
        return type(recipe)
    moved = [at for step in recipe.steps for at, _ in step.operands]
    asked = {*moved, *[slot.index for slot in slots_of(recipe.result)]}
    return {
        **{name: getattr(recipe, name) for name in ("is_quick", "made", "moved", "result")},
        "bound": recipe.bound is None, "leave": transition(recipe.leave),
        "moves": [(at, transition(move)) for at, move in recipe.moves],
        "metas": [meta for at, meta in enumerate(recipe.metas) if at in asked or oddly_laid(meta)],
        "steps": [described_step(step) for step in recipe.steps],
    }


def oddly_laid(meta: Any) -> bool:
    return meta is not None and meta.strides is not None


def described_step(step: Step) -> Any:
    return {
        **{name: getattr(step, name) for name in (
            "name", "anchor", "args", "flowing", "kwargs", "target", "write_back",
        )},
        "local": local(step.local), "bound": step.bound is None, "why": step.why(),
        "write": transition(step.write),
        "operands": [(at, transition(move)) for at, move in step.operands],
        "results": [(at, transition(leave)) for at, leave in step.results],
    }


def local(function: Any) -> Any:
    """The local op, and the numbers, or the shards, that it has been given."""
    if isinstance(function, partial):
        return function.func, [(one.operands, one.dims) for one in function.args]
    cells = getattr(function, "__closure__", None) or ()
    numbers = [cell.cell_contents for cell in cells]
    return getattr(function, "__qualname__", str(function)), [
        number for number in numbers if isinstance(number, (int, float, tuple))
    ]


def transition(move: Any) -> Any:
    return move and (move.src, move.dst, move.src_varying, move.dst_varying, move.order)


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> Checker:
    made = Checker()
    monkeypatch.setattr(build, "recipe", made)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_known_structures_give_what_a_fresh_build_gives(family: str, checker: Checker) -> None:
    for number, case in enumerate(drawn(FAMILIES[family].CASES)):
        axes = MESHES[number % len(MESHES)]
        runs = list(sized_runs(case, Mesh(axes)))
        if runs:
            run_on_ranks(case, axes, runs)
    share = min(1, EFFORT)
    assert checker.num_compared > 25 * share  # ranks with empty views decide anew
    assert checker.num_programs > 20 * share or family != "loss"


def run_on_ranks(case: Case, axes: dict[str, int], runs: list[Any]) -> None:
    def on_rank(mesh: Any) -> None:
        for tensors, layouts in runs:
            operands = [
                weft.distribute_tensor(tensor, mesh, layout, src_data_rank=None)
                for tensor, layout in zip(tensors, layouts)
            ]
            for operand, spec in zip(operands, case.operands):
                if case.grad and operand.is_floating_point() and not spec.fixed:
                    operand.requires_grad_()
            for result in flat(case.fn(*operands)):
                if isinstance(result, ShardTensor):
                    assert result._local.shape == result.sharding.local_shape_at(mesh.here)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            weft.testing.run(on_rank, mesh=axes)
        except weft.UnsupportedOpError:
            assert case.may_refuse


def sized_runs(case: Case, mesh: Mesh) -> Any:
    """The case's operands with every length exchanged for another, the same where it was the
    same, in layouts of one spelling; sizes that the case's numbers do not fit are left out."""
    draw = random.Random(f"{case.name} {mesh}")
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    lengths = sorted({length for operand in case.operands for length in operand.shape})
    partial = [one.make(generator).dtype is not torch.bool for one in case.operands]
    names = [
        draw.choice(list(layouts_of(mesh, one.shape, may)))
        for one, may in zip(case.operands, partial)
    ]
    for _ in range(NUM_SIZES):
        # No classes at all: nothing that a loss could mean.
        least = int(case in loss.CASES)
        new = {length: draw.choice((length, draw.randint(least, 9))) for length in lengths}
        if draw.random() < 0.3:
            new = {length: length for length in lengths}
        new |= {length: length for length in (0, 1)}
        tensors = [
            resized(operand.make(generator), [new[length] for length in operand.shape], generator)
            for operand in case.operands
        ]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case.fn(*[tensor.clone() for tensor in tensors])
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError):
            continue
        have = [layouts_of(mesh, tensor.shape, may) for tensor, may in zip(tensors, partial)]
        yield tensors, [
            recut(of_one.get(name) or of_one[name.rstrip("!?%")], draw)
            for of_one, name in zip(have, names)
        ]


def recut(layout: Layout, draw: random.Random) -> Layout:
    """The layout with other explicit cuts, where it has some."""
    return layout.replace(cuts=[
        cut and (0, *sorted(draw.randint(0, cut[-1]) for _ in cut[2:]), cut[-1])
        for cut in layout.cuts
    ])


def resized(tensor: Tensor, shape: list[int], generator: torch.Generator) -> Tensor:
    """A tensor of this shape with elements drawn from the tensor's."""
    if not tensor.numel():
        return tensor.new_zeros(shape)
    places = torch.randint(tensor.numel(), shape, generator=generator)
    return tensor.flatten()[places]


def test_a_number_that_was_a_length(checker: Checker) -> None:
    """`topk(8)` of 8 columns gives all of them; of 16 it does not."""
    def on_rank(mesh: Any) -> list[Any]:
        seen = []
        for columns in (8, 16, 8, 12):
            x = weft.distribute_tensor(torch.arange(6.0 * columns).view(6, columns), mesh, P("x"))
            values, places = torch.topk(x, 8, 1)
            seen.append((values.shape, values.full_tensor().shape, places.full_tensor().shape))
        return seen

    for seen in weft.testing.run(on_rank, mesh={"x": 2}):
        assert seen == [((6, 8),) * 3] * 4


@pytest.mark.parametrize("spec", [P(), P("x"), P(partial={"x": "sum"})], ids=str)
@ranks(x=2)
def test_a_view_that_has_to_copy_is_told_its_size(mesh: Any, spec: P, checker: Checker) -> None:
    """The copy hides that the local op is `reshape`, whose size is another for other lengths."""
    for rows, columns in ((9, 7), (7, 9), (6, 5), (12, 7)):
        full = torch.arange(8.0 * rows * columns).view(2, rows, 4, columns)
        x = weft.distribute_tensor(full, mesh, spec)
        for mine, due in ((x, x.full_tensor()), (x[..., 1:], x.full_tensor()[..., 1:])):
            mine, due = (one.transpose(1, 2).reshape(8, rows, one.shape[-1]) for one in (mine, due))
            assert mine.to_local().shape == mine.sharding.local_shape_at(mesh.here)
            torch.testing.assert_close(mine.full_tensor(), due)


@pytest.mark.parametrize("keys", [P(), P(None, None, "x")], ids=str)
@ranks(x=2)
def test_a_kernel_knows_the_lengths_of_all_operands(mesh: Any, keys: P, checker: Checker) -> None:
    """Of attention only queries may be sharded; keys are longer or shorter the next time."""
    for num, of_keys in ((6, 6), (5, 8), (8, 5), (9, 9)):
        full = [torch.randn(1, 2, length, 4) for length in (num, of_keys, of_keys)]
        mine = [weft.distribute_tensor(one, mesh, spec).requires_grad_()
                for one, spec in zip(full, (P(None, None, "x"), keys, keys))]
        whole = [one.full_tensor().detach().requires_grad_() for one in mine]
        out, due = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            for q, k, v in (mine, whole))
        torch.testing.assert_close(out.full_tensor(), due)
        out.square().sum().backward()
        due.square().sum().backward()
        for one, other in zip(mine, whole):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)


def test_lengths_that_happen_to_be_equal(checker: Checker) -> None:
    """The rule of `gather` compares them: where they are equal, both are sharded alike."""
    def on_rank(mesh: Any) -> list[str]:
        seen = []
        for rows, places in ((5, 9), (7, 7), (9, 5), (6, 6)):
            x = weft.distribute_tensor(torch.arange(4.0 * rows).view(4, rows), mesh, P(None, "x"))
            index = weft.distribute_tensor(torch.zeros(4, places, dtype=torch.int64), mesh, P())
            if places <= rows:
                seen.append(str(torch.gather(x, 0, index).spec))
        return seen

    seen = weft.testing.run(on_rank, mesh={"x": 2})
    assert seen == [["P(None, 'x')", "P('x')", "P(None, 'x')"]] * 2, seen


def captures_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What has been captured from now on."""
    seen: list[Any] = []
    real = capture.capture

    def counted(func: Any, *args: Any) -> Any:
        seen.append(func)
        return real(func, *args)

    monkeypatch.setattr(build, "capture", counted)
    monkeypatch.setattr(compose, "capture", counted)
    return seen


CALLS = {
    "add": lambda x, t: x + x, "linear": lambda x, t: F.linear(x, torch.ones(3, 7)),
    "softmax": lambda x, t: x.softmax(-1), "cross_entropy": lambda x, t: F.cross_entropy(x, t),
    "smooth": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "sum": lambda x, t: F.cross_entropy(x, t, reduction="sum", ignore_index=2),
    "layer_norm": lambda x, t: F.layer_norm(x, (7,)), "zero": lambda x, t: x.clone().zero_(),
    "in place": lambda x, t: x.detach().mul_(x), "like": lambda x, t: torch.zeros_like(x),
}


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_third_size_captures_nothing(
    name: str, spec: P, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = captures_of(monkeypatch)

    def on_rank(mesh: Any) -> None:
        for rows in (4, 5, 9, 8):
            if rows == 9:
                seen.clear()
            full, targets = torch.randn(rows, 7), torch.arange(rows) % 7
            x = weft.distribute_tensor(full, mesh, spec, src_data_rank=None).requires_grad_()
            t = weft.distribute_tensor(targets, mesh, P(*spec.entries[:1]), src_data_rank=None)
            out, due = CALLS[name](x, t), CALLS[name](full, targets)
            torch.testing.assert_close(out.full_tensor(), due)

    weft.testing.run(on_rank, mesh={"x": 1})
    assert not seen, seen


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()], ids=str)
@ranks(x=2)
def test_numbers_that_follow_from_lengths(mesh: Any, spec: P, checker: Checker) -> None:
    """The count of a mean: of 4 x 6 as of 6 x 4, then of others."""
    for shape in ((4, 6), (6, 4), (8, 6), (8, 3), (5, 6), (5, 5)):
        full = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
        x = weft.distribute_tensor(full, mesh, spec, src_data_rank=None)
        for mine, due in ((x.mean(), full.mean()), (x.mean(0), full.mean(0)),
                          (F.mse_loss(x, x * 2), F.mse_loss(full, full * 2))):
            torch.testing.assert_close(mine.full_tensor(), due)


@ranks(x=2)
def test_other_cuts_of_one_length_leave_other_lengths_open(mesh: Any, checker: Checker) -> None:
    for sizes in ((2, 4), (1, 5), (6, 6), (8, 4)):
        full = torch.arange(1.0, 1 + 4 * sum(sizes)).view(-1, 4)
        layout = Layout(mesh, full.shape, P("x"), sizes={0: sizes})
        x = weft.distribute_tensor(full, mesh, layout, src_data_rank=None)
        torch.testing.assert_close(x.mean().full_tensor(), full.mean())


def test_zeros_that_want_a_gradient() -> None:
    def on_rank(mesh: Any) -> list[bool]:
        x = weft.distribute_tensor(torch.ones(4, 3), mesh, P("x"), src_data_rank=None)
        made = [torch.zeros_like(x), torch.zeros_like(x, requires_grad=True)]
        x.requires_grad_()
        made += [torch.zeros_like(x), torch.zeros_like(x, requires_grad=True), torch.detach(x)]
        assert all(one._meta.requires_grad == one.requires_grad for one in made)
        return [one.requires_grad for one in made]

    assert weft.testing.run(on_rank, mesh={"x": 2}) == [[False, True, False, True, False]] * 2


def attend(x: Tensor, few: int) -> Tensor:
    """The last `few` queries of four heads attend to two heads of keys."""
    heads = x.view(x.shape[0], x.shape[1], -1, 2).transpose(1, 2)
    query = torch.cat((heads[:, :2], heads[:, 2:4]), 1)[:, :, -few:]
    keys = heads[:, -2:].contiguous()
    return F.scaled_dot_product_attention(query, keys, keys, enable_gqa=True)


OF_LENGTHS = {
    "grows": lambda x: torch.cat((x, x[:, :1]), 1),
    "two kinds": lambda x: torch.cat((x, x, x[:, 1:2] * 2), dim=-2),
    "heads": lambda x: x.view(x.shape[0], x.shape[1], -1, 2).transpose(1, 2),
    "heads joined": lambda x: x.view(*x.shape[:2], 4, -1).transpose(1, 2).transpose(1, 2)
    .contiguous().reshape(x.shape[0], x.shape[1], -1),
    "turned": lambda x: torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * 2,
    "of a part": lambda x: x[:, 1:][..., :3].transpose(1, 2).neg()[:, 1:-1].cos(),
    "ends": lambda x: x[:, -1:] + x[:, :1] + x.narrow(1, 1, 1),
    "shifted": lambda x: x[:, :-1].contiguous() * x[:, 1:],
    "padded": lambda x: F.pad(x, (0, 2)) + F.pad(x, (1, 1), value=2.0),
    "padded, longer": lambda x: F.pad(x, (0, 0, 0, 1), value=2.0).float(),
    "rows": lambda x: x.view(-1, x.shape[-1]) * 2,
    "all": lambda x: x.reshape(-1).sin(),
    "rows of heads": lambda x: x.flatten(0, 1).view(-1, 2, x.shape[-1] // 2) * x.view(
        -1, 2, x.shape[-1] // 2),
    "one attends": lambda x: attend(x, 1),
    "some attend": lambda x: attend(x, 3),
}
"""Numbers that are lengths, and lengths that are sums."""

SHAPES = [
    (4, 5, 8), (4, 6, 8), (7, 9, 8), (4, 4, 8), (5, 9, 8), (3, 11, 8), (6, 6, 8), (8, 8, 8),
    (4, 12, 8), (4, 7, 8), (1, 5, 8), (7, 2, 8), (2, 10, 8), (6, 5, 16), (6, 7, 16), (2, 3, 10),
]
LAYOUTS = [P("x"), P(None, "x"), P(None, None, "x"), P("y", "x"), P(("x", "y")), P(), "ragged",
           P("x", None, "y")]


@pytest.mark.parametrize("name", OF_LENGTHS)
def test_numbers_that_are_lengths_and_lengths_that_are_sums(name: str, checker: Checker) -> None:
    all_of_it = EFFORT >= 1
    at = list(OF_LENGTHS).index(name)
    layouts = LAYOUTS if all_of_it else [LAYOUTS[at % len(LAYOUTS)]]
    shapes = SHAPES if all_of_it else SHAPES[:3]

    def on_rank(mesh: Any) -> None:
        draw = random.Random(name)
        for spec in layouts:
            for shape in shapes:
                layout = spec
                if spec == "ragged":
                    first = draw.randint(0, shape[0]) if all_of_it else int(shape != shapes[-1])
                    layout = Layout(mesh, shape, P("x"), sizes={0: (first, shape[0] - first)})
                agrees(OF_LENGTHS[name], shape, mesh, layout)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weft.testing.run(on_rank, mesh={"x": 2, "y": 1 + all_of_it})
    assert checker.num_compared > (100 if all_of_it else 0)


def agrees(call: Any, shape: tuple[int, ...], mesh: Any, layout: Any) -> None:
    """The call gives what it gives in one process, forward and backward."""
    full = torch.arange(float(math.prod(shape))).view(shape).cos().requires_grad_()
    try:
        due = call(full)
    except (RuntimeError, IndexError):
        return
    x = weft.distribute_tensor(full.detach(), mesh, layout, src_data_rank=None)
    torch.testing.assert_close(call(x).full_tensor(), due.detach())
    made = call(x.requires_grad_())
    assert made._local.shape == made.sharding.local_shape_at(mesh.here)
    assert made.stride() == due.stride()
    torch.testing.assert_close(made.full_tensor(), due)
    due.square().sum().backward()
    made.square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), full.grad)


FOR_SOME_LENGTHS = {
    "ends": (lambda x: [x[:, :3] * 2, x[:, -3:] * 2, x[:, 2:] * 2, x.narrow(1, 0, 2) * 2],
             [(4, 5, 8), (4, 4, 8), (4, 2, 8), (4, 3, 8), (5, 6, 8)]),
    "heads": (lambda x: [x.view(x.shape[0], x.shape[1], -1, 2) * 2, x.flatten(1) * 2,
                         x.view(x.shape[0], -1, 4) * 2],
              [(4, 5, 8), (4, 5, 12), (4, 7, 16), (5, 6, 8)]),
    "a dim": (lambda x: [x.sum(x.shape[0]), x.softmax(x.shape[0])],
              [(2, 5, 6, 4), (3, 5, 6, 4), (2, 7, 6, 4), (3, 7, 8, 6)]),
    "a count": (lambda x: [x.topk(x.shape[0], 1)[0], x.unflatten(1, (x.shape[0], -1)) * 2],
                [(2, 8, 3), (4, 8, 3), (2, 12, 3), (6, 12, 3)]),
    "cropped": (lambda x: [F.pad(x, (0, 0, -2, 0)), F.pad(x, (0, 1, 0, -1))],
                [(4, 5, 8), (4, 2, 8), (4, 3, 8), (5, 7, 8)]),
}
"""Calls of which a length means something else than another, and lengths, in order."""


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P(None, None, "x")], ids=str)
@pytest.mark.parametrize("name", FOR_SOME_LENGTHS)
def test_what_holds_for_some_lengths_alone(name: str, spec: P, checker: Checker) -> None:
    call, shapes = FOR_SOME_LENGTHS[name]

    def on_rank(mesh: Any) -> None:
        for shape in shapes:
            full = torch.arange(float(math.prod(shape))).view(shape).cos()
            x = weft.distribute_tensor(full, mesh, spec, src_data_rank=None)
            for made, due in zip(call(x), call(full)):
                assert made._local.shape == made.sharding.local_shape_at(mesh.here)
                torch.testing.assert_close(made.full_tensor(), due)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weft.testing.run(on_rank, mesh={"x": 2})


@ranks(x=2)
def test_what_is_made_of_a_reduced_value_was_not_reduced(mesh: Any, checker: Checker) -> None:
    for length in (5, 7, 9):
        full = torch.arange(6.0 * length).view(6, length)
        x = weft.distribute_tensor(full, mesh, P("x"), src_data_rank=None).sum(0, keepdim=True)
        if length > 5:
            x.exp()  # reduces it
        assert x._meta.was_reduced == (length > 5)
        made = x.expand(1, length)
        assert not made._meta.was_reduced
        torch.testing.assert_close(made.full_tensor(), full.sum(0, keepdim=True))
