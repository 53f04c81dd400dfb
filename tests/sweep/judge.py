"""One sample in one way: the same call on plain tensors and on ShardTensors."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import weft
from tests.cases import seed_of
from tests.harness import Outcome, held, local_part
from tests.oracle import Close, Held, check, check_gradient, same
from tests.sweep.budget import allowed
from tests.sweep.rounding import NARROW, Rounding, rounding
from tests.sweep.samples import LeftOut, Sample
from tests.sweep.ways import laid_out
from weft import Layout, ShardTensor
from weft.tensor.placing.left_whole import _WARNED

__all__ = ["VERDICTS", "Dense", "Verdict", "backward", "dense", "judge", "leaves", "left_whole",
           "short"]

VERDICTS = ("right", "gathered", "costly", "refused", "unclear", "wrong", "hang", "crash")
"""`gathered` is right with a warning of a fallback; `costly` is right without one, for more bytes
than the table of `budget` allows; `unclear` an error that is not weft's own."""


@dataclass(frozen=True, slots=True)
class _Seen(Outcome):
    """What one rank made of a sample: besides results and gradients the form of the results, the
    operands that are to be written to, or are terms, which may become others of the same value, and
    the places of those whose local parts have changed. `unsteady`: the results, then gradients,
    that are others in a second call. `whole`: whether a result is left whole."""

    form: str
    written: list[Held | None]
    changed: list[int]
    unsteady: list[int]
    whole: bool


Like = Callable[[Tensor, Tensor], Tensor]
"""A result and its plain cotangent to the cotangent that backward begins with."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a sample in a way.

    `nbytes`: what the rank that got most received from others, forward and backward, and
    `most` how much of that the table allows; None where it does not say. `whole`: whether a
    result is left whole of an operand that was sharded.
    """

    kind: str
    detail: str = ""
    nbytes: tuple[int, int] | None = None
    most: tuple[int, int] | None = None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Dense:
    """What the call gives on plain tensors, the gradients of those that want one, and how far
    each is rounded.

    `form`: the containers of the results, and which of them require a gradient. `written`: the
    operands that the call has written to, as they are then, None for the others.
    """

    results: list[Any]
    gradients: list[Tensor | None]
    rounding: Rounding | None = None
    form: str | None = None
    written: Sequence[Tensor | None] = ()

    def close(self, num_ranks: int) -> tuple[list[Close], list[Close]]:
        """How far results and gradients may be off on so many ranks; None: as the dtype says."""
        return (
            self._close(num_ranks, len(self.results), self.rounding and self.rounding.results),
            self._close(num_ranks, len(self.gradients), self.rounding and self.rounding.gradients),
        )

    def close_written(self, num_ranks: int) -> list[Close]:
        """The same of the operands; what the call did not write to is as it was given."""
        return self._close(num_ranks, len(self.written), self.rounding and self.rounding.written)

    @staticmethod
    def _close(num_ranks: int, count: int, each: Sequence[Close] | None) -> list[Close]:
        if not each:
            return [None] * count
        return [None if one is None else one * (num_ranks + 1) for one in each]


def dense(sample: Sample) -> Dense:
    """What the call gives on plain tensors.

    Raises:
        LeftOut: it raises, draws random numbers, or gives nothing that can be compared.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            once, again = _plain(sample, 1), _plain(sample, 2)
        except LeftOut:
            raise
        except Exception as error:
            raise LeftOut(f"on plain tensors it raises {short(error)[:80]}") from error
    for one, other in zip(once.results, again.results):
        if isinstance(one, Tensor) and not _is_comparable(one):
            raise LeftOut(f"nothing compares {one.dtype}, {one.layout}")
        if isinstance(one, Tensor) and not _equal(one, other):
            raise LeftOut("on plain tensors it gives something else each time")
    if _fails_when_narrow(sample, once):
        raise LeftOut("on plain tensors its gradient is NaN, and in double precision it is not")
    written = [place for place, one in enumerate(once.written) if one is not None]
    return dataclasses.replace(once, rounding=rounding(
        lambda tensors, like: _outcome(sample, tensors, like, written), sample.tensors,
        once.results, once.gradients, sample.adds, once.written,
    ))


def _fails_when_narrow(sample: Sample, once: Dense) -> bool:
    """Whether torch's own gradient is NaN where rounding alone is to blame: that of a complex64
    renorm by the largest element, which it does not find again."""
    if not any(one is not None and one.isnan().any() for one in once.gradients):
        return False
    wide = [one.to(NARROW.get(one.dtype, one.dtype)) for one in sample.tensors]
    with torch.random.fork_rng([]):
        _, gradients = _outcome(sample, wide, lambda one, steps: steps, ())
    return any(
        mine is not None and due is not None and bool((mine.isnan() & ~due.isnan()).any())
        for mine, due in zip(once.gradients, gradients)
    )


def _is_comparable(one: Tensor) -> bool:
    """torch has no arithmetic to compare uint64 and complex32 by, and terms of sparse tensors."""
    return one.layout == torch.strided and one.dtype not in (torch.uint64, torch.complex32)


def _equal(one: Tensor, other: Tensor) -> bool:
    numbers = one.dtype.is_floating_point or one.dtype.is_complex
    same = (one == other) | ((one != one) & (other != other)) if numbers else one == other
    return one.shape == other.shape and bool(same.all())


def _plain(sample: Sample, seed: int) -> Dense:
    """The state tells whether it draws: two draws of a few integers may well be equal."""
    torch.manual_seed(seed)
    state = torch.get_rng_state()
    given = _given(sample, sample.tensors)
    value = sample.fn(given)
    form, results = form_of(value), leaves(value)
    backward(results)
    if not torch.equal(state, torch.get_rng_state()):
        raise LeftOut("it draws random numbers")
    written = [None if _bits_equal(one, before) else one.detach()
               for one, before in zip(given, sample.tensors)]
    return Dense(_detached(results), [leaf.grad for leaf in given], None, form, written)


def _outcome(
    sample: Sample, tensors: Sequence[Tensor], like: Like, written: Sequence[int]
) -> tuple[list[Any], list[Tensor | None]]:
    """Results and what is written to, then gradients."""
    given = _given(sample, tensors)
    results = leaves(sample.fn(given))
    backward(results, like)
    results += [given[place] for place in written]
    return _detached(results), [leaf.grad for leaf in given]


def _given(sample: Sample, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.clone().requires_grad_(g) for t, g in zip(tensors, sample.wants_grad)]


def _detached(results: list[Any]) -> list[Any]:
    return [one.detach() if isinstance(one, Tensor) else one for one in results]


def form_of(value: Any) -> str:
    """The containers that the results stand in, and which of them require a gradient."""
    tree = pytree.tree_map(
        lambda one: isinstance(one, Tensor) and one.requires_grad, value
    )
    return str(tree)


def _bits_equal(one: Tensor, other: Tensor) -> bool:
    def bits(it: Tensor) -> Tensor:  # of a clone: views of one element may have any stride
        flat = it.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        return flat.view(torch.uint8) if flat.numel() else flat

    return one.shape == other.shape and torch.equal(bits(one), bits(other))


def judge(sample: Sample, expected: Dense, way: str, what: str) -> Verdict | None:
    """None where the way does not apply."""
    placed = laid_out(way, sample.tensors, sample.roles)
    if placed is None:
        return None
    mesh, layouts = placed

    def on_rank(bound: Any) -> tuple[_Seen, tuple[int, int]]:
        parts = [
            tensor if layout is None
            else local_part(layout, tensor, bound.here, seed_of(what, place))
            for place, (tensor, layout) in enumerate(zip(sample.tensors, layouts))
        ]

        def called() -> tuple[list[Tensor], str, list[Any]]:
            operands = [
                part.clone() if layout is None else ShardTensor.from_local(
                    _laid_like(part, tensor), bound, layout, stride=tensor.stride()
                )
                for part, layout, tensor in zip(parts, layouts, sample.tensors)
            ]
            for operand, wanted in zip(operands, sample.wants_grad):
                operand.requires_grad_(wanted)
            value = sample.fn(operands)
            results = leaves(value)
            form = form_of(value)
            backward(results)
            return operands, form, results

        with weft.explain() as log:
            operands, form, results = called()
        again = called()  # by the recipe, which is known by now, and unwatched
        return _Seen(
            [held(one.detach()) if isinstance(one, Tensor) else one for one in results],
            [None if one.grad is None else held(one.grad) for one in operands],
            [],  # no rank is outside
            form,
            [held(one.detach()) if due is not None or (layout and layout.is_partial) else None
             for one, due, layout in zip(operands, expected.written, layouts)],
            [place for place, (one, part) in enumerate(zip(operands, parts))
             if not _bits_equal(_local(one), part)],
            [place for place, pair in enumerate(zip(
                [*results, *(one.grad for one in operands)],
                [*again[2], *(one.grad for one in again[0])],
            )) if not _same_again(*pair)],
            left_whole([one for one in layouts if one is not None], results),
        ), _received(log)

    _WARNED.clear()  # every call warns by itself
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcomes, received = zip(*weft.testing.run(on_rank, mesh.size(), mesh))
        except weft.CommunicationError as error:  # ranks that wait for each other: no refusal
            return Verdict("hang", short(error))
        except weft.WeftError as error:
            return Verdict("refused", short(error))
        except Exception as error:
            return Verdict("unclear", short(error))
        try:
            due = _among_equals(sample, expected, outcomes, what)
            _verify(sample, due, outcomes, layouts, what)
        except AssertionError as error:
            return Verdict("wrong", short(error))
    gathered = [it for it in caught if issubclass(it.category, weft.WeftWarning)]
    nbytes = max(one for one, _ in received), max(other for _, other in received)
    most = allowed(what.split()[0], sample, expected.results, layouts, mesh)
    whole = outcomes[0].whole
    if gathered:
        return Verdict("gathered", short(gathered[0].message), nbytes, most, whole)
    if most is not None and any(got > most for got, most in zip(nbytes, most)):
        return Verdict("costly", f"received {nbytes}, allowed {most}", nbytes, most, whole)
    return Verdict("right", "", nbytes, most, whole)


def left_whole(operands: Sequence[Layout], results: Sequence[Any]) -> bool:
    """Whether some mesh axis shards an operand, of which no rank has all, and leaves the largest
    result whole on every rank, although that has more elements than a shard of the operand."""
    made = [one for one in results if isinstance(one, ShardTensor)]
    if not made:
        return False
    result = max([one.sharding for one in made], key=lambda one: math.prod(one.shape))
    for operand in operands:
        most = min(math.prod(operand.shape), _most_elements(result))
        for axis in range(operand.mesh.ndim):
            dim = operand.on(axis)
            if isinstance(dim, int) and operand.shape[dim] > 1 and (
                result.on(axis) is None and _most_elements(operand) < most
            ):
                return True
    return False


def _most_elements(layout: Layout) -> int:
    """How many elements the largest shard has."""
    return math.prod([max(layout.sizes_of(dim), default=0) for dim in range(layout.ndim)])


def _same_again(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other or one != one)
    return (
        (one.dtype, one.stride(), getattr(one, "sharding", None))
        == (other.dtype, other.stride(), getattr(other, "sharding", None))
        and _bits_equal(_local(one), _local(other))
    )


def _laid_like(part: Tensor, tensor: Tensor) -> Tensor:
    """A copy of a part of a tensor, its dims in memory in the order of the whole one's."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    back = [order.index(dim) for dim in range(tensor.dim())]
    return part.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def _local(one: Tensor) -> Tensor:
    return one.detach().to_local() if isinstance(one, ShardTensor) else one.detach()


def _received(log: Any) -> tuple[int, int]:
    """Bytes of a log, forward and backward."""
    totals = {"forward": 0, "backward": 0}
    for event in log.events:
        totals[event.direction] += event.nbytes
    return totals["forward"], totals["backward"]


UNTOLD = ("sort", "msort", "argsort", "topk", "kthvalue", "median", "nanmedian", "mode")
"""Ops that name places of elements; which of equal ones, torch leaves open, and so which of them
gets which gradient."""


def _among_equals(
    sample: Sample, expected: Dense, outcomes: Sequence[_Seen], what: str
) -> Dense:
    """What is expected, with places that name other elements, but equal ones, put in its stead."""
    if what.split()[0] not in UNTOLD:
        return expected
    results = list(expected.results)
    last = max(place for place, due in enumerate(results) if isinstance(due, Tensor))
    for place, due in enumerate(results):
        found = outcomes[0].results[place] if place < len(outcomes[0].results) else None
        if (
            isinstance(due, Tensor) and isinstance(found, Held) and due.dtype is torch.long
            and found.full.shape == due.shape
            and place == last
            and any(_names_equals(sample.tensors[0], found.full, due, dim, what.split()[0])
                    for dim in range(sample.tensors[0].dim()))
        ):
            results[place] = due.clone().copy_(found.full)  # its strides are to stay
    gradients = list(expected.gradients)
    due, found = gradients[0], outcomes[0].gradients[0]
    if due is not None and found is not None and found.full.shape == due.shape and _equal(
        *[_by_element(sample.tensors[0], one) for one in (found.full, due)]
    ):
        gradients[0] = due.clone().copy_(found.full)
    return dataclasses.replace(expected, results=results, gradients=gradients)


def _by_element(x: Tensor, gradient: Tensor) -> Tensor:
    """The gradients in the order of their elements, those of equal elements ascending."""
    order = gradient.flatten().argsort()
    order = order[x.flatten()[order].argsort(stable=True)]
    return gradient.flatten()[order]


def _names_equals(x: Tensor, found: Tensor, due: Tensor, dim: int, op: str) -> bool:
    if due.dim() == x.dim() - 1:
        found, due = found.unsqueeze(dim), due.unsqueeze(dim)
    if due.dim() != x.dim() or not due.numel() or any(
        x.shape[at] != due.shape[at] for at in range(x.dim()) if at != dim
    ) or not (
        int(found.min()) >= 0 and int(found.max()) < x.shape[dim]
    ):
        return False
    if "sort" in op and not torch.equal(found.sort(dim)[0], due.sort(dim)[0]):
        return False
    return _equal(x.gather(dim, found), x.gather(dim, due))


def _verify(
    sample: Sample, expected: Dense, outcomes: Sequence[_Seen], layouts: list[Any], what: str
) -> None:
    _verify_operands(sample, expected, outcomes, what)
    close, close_gradients = expected.close(len(outcomes))
    for place, due in enumerate(expected.results):
        counts = {len(outcome.results) for outcome in outcomes}
        assert counts == {len(expected.results)}, f"{what}: {counts} results"
        mine: list[Any] = [outcome.results[place] for outcome in outcomes]
        if isinstance(due, Tensor):
            assert all(isinstance(one, Held) for one in mine), f"{what}: no tensor, {mine}"
            check(due, mine, f"{what}: result {place}", close[place])
        elif isinstance(due, (bool, int, float, complex)):
            for one in mine:
                same(torch.tensor(one), torch.tensor(due), f"{what}: result {place}")
        else:
            assert all(one == due for one in mine), f"{what}: result {place}: {mine}"
    for place, (due, layout) in enumerate(zip(expected.gradients, layouts)):
        mine = [outcome.gradients[place] for outcome in outcomes]
        where = f"{what}: gradient {place}"
        check_gradient(due, layout, mine, where, close_gradients[place])


def _verify_operands(
    sample: Sample, expected: Dense, outcomes: Sequence[_Seen], what: str
) -> None:
    """The results' form, and that operands are what the call leaves of them."""
    for outcome in outcomes:
        assert expected.form in (None, outcome.form), (
            f"{what}: results {outcome.form}, {expected.form} due"
        )
        assert not outcome.unsteady or not _is_steady(sample), (
            f"{what}: called again, {outcome.unsteady} are others"
        )
        stray = [place for place in outcome.changed if place < len(expected.written)
                 and outcome.written[place] is None]
        assert not stray, f"{what}: operands {stray} were written to"
    close = expected.close_written(len(outcomes))
    for place, (due, before) in enumerate(zip(expected.written, sample.tensors)):
        mine = [one for one in (outcome.written[place] for outcome in outcomes) if one is not None]
        if mine:
            where = f"{what}: operand {place}"
            check(before if due is None else due, mine, where, close[place])


def _is_steady(sample: Sample) -> bool:
    """Whether torch itself gives the same bits each time: lstsq by gelsy does not, whose last bits
    differ with what lies in the memory it is given."""
    known: list[Tensor] = []
    for number in range(200):
        for length in range(1, 17):
            torch.full((length,), number, dtype=torch.int32)  # lies there when it is freed
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            found = leaves(sample.fn([one.clone() for one in sample.tensors]))
        found = [one for one in found if isinstance(one, Tensor)]
        if known and not all(map(_bits_equal, known, found)):
            return False
        known = found
    return True


def leaves(value: Any) -> list[Any]:
    return pytree.tree_leaves(value)


def backward(results: list[Any], like: Like = lambda one, steps: steps) -> None:
    """Backward from every result that has a gradient, from the same cotangent on all ranks.

    `like` makes the plain cotangent what the result's own class takes.
    """
    live = [one for one in results if isinstance(one, Tensor) and one.requires_grad]
    for place, one in enumerate(live):
        generator = torch.Generator().manual_seed(seed_of("cotangent", place))
        shape = (*one.shape, 2) if one.is_complex() else one.shape
        steps = torch.randint(-512, 513, shape, generator=generator) / 256
        steps = torch.view_as_complex(steps) if one.is_complex() else steps
        one.backward(gradient=like(one, steps.to(one.dtype)), retain_graph=place + 1 < len(live))


def short(error: object) -> str:
    """The beginning of an error, for the journal."""
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text}"[:600]
