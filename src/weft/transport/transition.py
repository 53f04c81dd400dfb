"""From one layout to another, differentiable to any order.

On one axis a value is S (sharded), I (replicated, its gradient too), P (partial) or R (replicated,
but used by a computation that varies over the axis, so that its gradient is partial). Gradients
have the dual: S for S, I for I, R for P, P(sum) for R. So a transition's backward is the
transition between the duals in the opposite direction, and so is the backward of that: the table of
the semantics is what the planner finds for the duals. This file adds what a kind of reduction does
to the size of a gradient, and P(product), whose gradient needs the other partial values:

- P(avg) reduced, and I -> P(max, min, and, or, band, bor): divided by the number of partial values.
- P(product) reduced: the partial values are gathered and multiplied one after the other by torch,
  whose gradient is that of exclusive products. Nothing is divided, so zeros are fine.
- I -> P(product): the gradient of the one coordinate that keeps the value, sent to all.
- P(product) on both sides: each factor has its own gradient, which moves as factors do.
- P(max, min, and, or, band, bor, bxor) -> anything: refused if a gradient is wanted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _DisableAutocast  # type: ignore[attr-defined]
from torch._C import _is_any_autocast_enabled as is_autocast_enabled
from torch.autograd import forward_ad

from weft.comm import BoundMesh, Finish
from weft.core.cover import Cover
from weft.core.layout import Layout
from weft.errors import UnsupportedOpError
from weft.planner import IDEMPOTENT, gradient_layout, planned, step_nbytes
from weft.transport import facts
from weft.transport.boxes import shape_of
from weft.transport.execute import CompiledPlan, compile_plan, owned, unshared
from weft.transport.in_flight import in_flight
from weft.transport.nodes import (
    REDUCTIONS,
    apply,
    check_maps,
    counting,
    outside_maps,
    refuse_transforms,
    transforms,
    with_gradient,
)
from weft.transport.order import Order, in_order
from weft.transport.traffic import STATE, moving
from weft.transport.unselected import unselected

__all__ = ["Casts", "Transition"]

Way = Callable[[Tensor], Tensor]

_NO_GRADIENT = IDEMPOTENT | {"bxor"}


class Casts(NamedTuple):
    """Dtypes of a transition: values come in `before`, are sent in `sent`, and leave in `after`;
    gradients are sent in `back`.

    One node casts and sends, because autograd casts the gradient of a node to the dtype of its
    result: separate casts would convert it in between.
    """

    before: torch.dtype
    sent: torch.dtype
    after: torch.dtype
    back: torch.dtype

    @property
    def reverse(self) -> Casts:
        """Those of the gradient."""
        return Casts(self.after, self.back, self.before, self.sent)


class Transition:
    """Takes this rank's part at `src` to its part at `dst`: `transition(local) -> local`.

    Args:
        mesh: the bound mesh of the source.
        src, dst: the layouts.
        target: the bound mesh of the target, if it is a different one. A rank that is in only one
            of them has a local tensor of shape (0,) on the other side.
        src_varying, dst_varying: replicated axes over which the value is used by a computation that
            varies (R instead of I); other axes in them are ignored.
        apart: axes that are partial on both sides with unrelated partial values.
        order: the memory order of the result's dims, if the result moves; None is that of the dims.
        cover: the boxes that ranks read beside `dst`, to which the result comes (a halo).
        folds: the boxes beside `src` of which ranks hold partial values, which are summed.
        casts: the dtypes, where they are not all the same.
        copy: the result never shares memory with the argument. Without it a result that needs no
            work is the argument itself, or (where autograd records) shares its memory.

    Raises:
        LayoutError: a pair that the planner refuses.
        UnsupportedOpError: when called, for a source that is partial by a kind without gradient,
            if one is wanted; with casts, for any kind whose gradient is more than a plan.
    """

    __slots__ = (
        "mesh", "src", "dst", "target", "src_varying", "dst_varying", "copy", "scale",
        "is_identity", "apart", "order", "cover", "casts", "folds", "communicates",
        "backward_communicates", "reduction", "_plan", "_back", "_reduces_only_in_backward",
        "_program", "_reverse", "_special", "_way",
    )

    def __init__(
        self,
        mesh: BoundMesh,
        src: Layout,
        dst: Layout,
        target: BoundMesh | None = None,
        *,
        src_varying: frozenset[int] = frozenset(),
        dst_varying: frozenset[int] = frozenset(),
        copy: bool = False,
        scale: float = 1.0,
        apart: frozenset[int] = frozenset(),
        order: Order | None = None,
        cover: Cover | None = None,
        folds: Cover | None = None,
        casts: Casts | None = None,
    ) -> None:
        self.mesh, self.src, self.dst, self.copy, self.scale = mesh, src, dst, copy, scale
        self.target = mesh if target is None else target
        self.src_varying = facts.replicated(src, src_varying)
        self.dst_varying = facts.replicated(dst, dst_varying)
        if src.mesh == dst.mesh:
            # Axes on which ranks hold values of their own, before and after: gradients do too.
            apart |= facts.factors(src) & facts.factors(dst)
        self.apart = apart
        self.order = None if self.target.here is None else order
        self.cover, self.folds, self.casts = cover, folds, casts
        self._plan = planned(src, dst, cover, folds)
        self._back = planned(
            gradient_layout(dst, self.dst_varying | self.apart),
            gradient_layout(src, self.src_varying | self.apart),
            None if folds is None else replace(folds, fill=0.0), cover,
        )
        self.communicates = facts.communicates(self._plan)
        self.backward_communicates = facts.communicates(self._back)
        is_inside = mesh.here is not None or self.target.here is not None
        self._special = _special(src, dst) if self._plan.steps else None
        if self._special is not None and casts is not None:
            self._special = _refuse_casts
        if self._special is _factor:  # the coordinate that keeps the value sends to the others
            self.backward_communicates = True
        works = self._plan.steps or self._back.steps or scale != 1 or facts.divisor(src, dst) != 1
        self.is_identity = not (copy or casts) and not (is_inside and works)
        self._program: CompiledPlan | None = None
        if self._plan.steps and is_inside:
            self._program = compile_plan(self._plan, mesh, self.target)
        # Communicator and kind, if one all-reduce is the whole transition.
        alone = self._program is not None and scale == 1 and not (copy or order or casts)
        self.reduction = self._program.reduction if alone and self._program else None
        self._reduces_only_in_backward: bool | None = None
        self._reverse: Transition | None = None
        self._way: Way | None = None

    def __call__(self, x: Tensor, read_only_use: bool = False) -> Tensor:
        """This rank's part at `dst`.

        `read_only_use`: one op uses it and only reads it. Writes to x then count for what autograd
        saves there, and the result may be a view of x: it is freed with the call, and if a graph
        keeps it, x is a leaf, which stays alive anyway. Otherwise the result holds memory of its
        own size.
        """
        if torch.is_grad_enabled():
            if not x.requires_grad:
                return counting(self._run(x, read_only_use), x) if read_only_use else self._run(x)
            if transforms() is not None:
                check_maps(x, self._call_text)
                with outside_maps():
                    return self(x, read_only_use)
            if REDUCTIONS.on and self.communicates and self.src.is_partial:
                REDUCTIONS.thread.passing()
            if self._special is None:
                return apply(x, self, read_only_use)
            if self._way is None:
                self._way = self._special(self)
            with _DisableAutocast():
                return self._way(x)
        return self._run(x, read_only_use)

    def start(self, x: Tensor) -> Tensor:
        """Like a call, but the last collective proceeds: the first use of the result waits.

        Until then `x` must not be written to (the use would raise). The result may never be used.
        """
        wants_grad = x.requires_grad and torch.is_grad_enabled()
        if not self.communicates or not self._program or (wants_grad and self.is_special):
            return self(x)
        x = x.clone() if x.is_inference() else x  # its writes are not counted
        brings: list[Finish] = []
        if wants_grad:
            if transforms() is not None:
                return self(x)
            out = with_gradient(
                x, lambda x: self._begin(x, brings), lambda grad: self.reverse(grad),
                why=lambda: f"gradient of {self.text}", always=False)
        else:
            out = self._begin(x, brings)
        return in_flight(out, x, brings[0])

    def _begin(self, x: Tensor, brings: list[Finish]) -> Tensor:
        """The result without its data; the function that provides them is added to the list."""
        program, casts = self._program, self.casts
        assert program is not None
        refuse_transforms(x, self._call_text)
        x = x if casts is None else x.to(casts.sent)
        with _DisableAutocast(), unselected(), self._told(x):
            finish = program.start(x)
        scale, order = self.scale, self.order

        def finished() -> Tensor:
            with _DisableAutocast(), unselected():  # its first use may be inside autocast
                out = finish()
            out = out if scale == 1 else out * scale
            out = out if casts is None else out.to(casts.after)
            return out if order is None else in_order(out, order)

        brings.append(finished)
        here = self.target.here
        shape: tuple[int, ...] = (0,)
        if here is not None and self.cover is not None:
            shape = shape_of(self.cover.box_at(self.dst, here))
        elif here is not None:
            shape = self.dst.local_shape_at(here)
        dtype = x.dtype if casts is None else casts.after
        return torch.empty_strided(shape, [0] * len(shape), dtype=dtype, device=x.device)

    @property
    def is_special(self) -> bool:
        """Whether its gradient is more than a plan between duals."""
        return self._special is not None

    @property
    def reduces_only_in_backward(self) -> bool:
        """Whether backward is one all-reduce, and the result the argument itself or zeros.

        That is I -> R, possibly with I -> P(sum) on other axes.
        """
        if self._reduces_only_in_backward is None:
            src, dst = self.src, self.dst
            kinds = {kind for kind, before in zip(dst.partial, src.partial) if kind != before}
            same = src.mesh == dst.mesh and src.dims == dst.dims and src.cuts == dst.cuts
            same = same and self.cover is None and self.folds is None
            self._reduces_only_in_backward = (
                same and kinds <= {"sum"} and not self.communicates
                and self.reverse.reduction is not None
            )
        return self._reduces_only_in_backward

    def nbytes(self, itemsize: int) -> int:
        """Bytes that all ranks together receive."""
        return sum([step_nbytes(step, itemsize) for step in self._plan.steps])

    def report(self, itemsize: int) -> None:
        """Report to the traffic log what a run moves."""
        if self._program is not None:
            self._program.report(self.text, itemsize)

    def as_node(self, x: Tensor, read_only_use: bool) -> Tensor:
        """The result of a node, as autograd gets it."""
        out = self._run(x, read_only_use and x.is_leaf)
        program = self._program
        if program is None or program.aliases or out._is_view():
            out = out.detach()  # a new tensor: autograd would take a view for a view op
        return counting(out, x) if read_only_use else out

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for transitions of one mesh that do the same to operands."""
        return (self.src, self.dst, self.src_varying, self.dst_varying, self.order, self.cover,
                self.casts)

    @property
    def text(self) -> str:
        """What changes, in the words of the table: `S(0)->R on dp`."""
        said = facts.text(self.src, self.dst, self.src_varying, self.dst_varying)
        return facts.with_halo(said, self._plan)

    @property
    def reverse(self) -> Transition:
        """The transition of the gradient."""
        if self._reverse is None:
            self._reverse = Transition(
                self.target, self._back.src, self._back.dst, self.mesh,
                src_varying=facts.partial_axes(self.dst) | self.dst_varying,
                dst_varying=facts.partial_axes(self.src) | self.src_varying,
                scale=self.scale / facts.divisor(self.src, self.dst), apart=self.apart,
                cover=self._back.cover, folds=self._back.folds,
                casts=None if self.casts is None else self.casts.reverse,
            )
        return self._reverse

    def _call_text(self) -> str:
        return f"transition {self.text}"

    def __repr__(self) -> str:
        return f"Transition({self.text}: {self.src} -> {self.dst})"

    def _run(self, x: Tensor, read_only_use: bool = False) -> Tensor:
        reduction = self.reduction
        if (
            reduction is not None and not STATE.on and forward_ad._current_level < 0
            and transforms() is None and not is_autocast_enabled()
        ):  # the usual case, which runs in every step
            return reduction[0].all_reduce(x, reduction[1])
        if self.casts is not None:
            x = x.to(self.casts.sent)
        program = self._program
        out = x
        if program is not None:
            if forward_ad._current_level >= 0 or transforms() is not None:
                refuse_transforms(x, self._call_text)
            if is_autocast_enabled():  # it knows `cat`, `prod` and others, and would cast there
                with _DisableAutocast():
                    out = self._run_program(program, x)
            else:
                out = self._run_program(program, x)
            if program.cuts and not read_only_use:
                out = owned(out)
        if self.scale != 1:
            out = out * self.scale
        out = unshared(out, x) if self.copy else out
        out = out if self.casts is None else out.to(self.casts.after)
        return out if self.order is None else in_order(out, self.order)

    def _run_program(self, program: CompiledPlan, x: Tensor) -> Tensor:
        with unselected(), self._told(x):
            return program.run(x)

    def _told(self, x: Tensor) -> AbstractContextManager[None]:
        """Report what moves. Inside, collectives know that they belong to this transition."""
        if STATE.on:
            self.report(x.element_size())
            return moving(f"{self.text}: {self.src} -> {self.dst}")
        return nullcontext()


# Kinds whose gradient is more than a plan between duals.


def _special(src: Layout, dst: Layout) -> Callable[[Transition], Way] | None:
    """The function for a pair of layouts whose gradient is no plan between duals."""
    if any(kind in _NO_GRADIENT and size > 1
           for kind, size in zip(src.partial, src.mesh.axis_sizes)):
        return _refuse
    taken, made = facts.products(src, dst)
    if taken:
        return _multiply
    return _factor if made else None


def _refuse(transition: Transition) -> Way:
    src = transition.src
    kinds = sorted({kind for kind in src.partial if kind in _NO_GRADIENT})
    raise UnsupportedOpError(
        f"transition {transition.text}",
        f"the source {src} is partial by {', '.join(kinds)} and requires a gradient",
        "P(max), P(min) and the logical kinds carry no gradient; amax, max, min and the "
        "like are ops with a gradient of their own", [f"partial {kind}" for kind in kinds],
        "x.detach() before the redistribute, or reduce by the op: x.amax(dim)")


def _refuse_casts(transition: Transition) -> Way:
    raise UnsupportedOpError(
        "redistribute(forward_dtype=, backward_dtype=)", f"a gradient is wanted "
        f"of {transition.text}", "only gradients of sums and means, and of "
        "what is not partial, travel in a dtype of their own",
        [transition.text],
        "x.redistribute(placements=...).to(dtype), or x.detach() before it")


def _multiply(transition: Transition) -> Way:
    """P(product) reduced: every rank gathers the partial values and multiplies them in order."""
    mesh, src, dst = transition.mesh, transition.src, transition.dst
    axes, _ = facts.products(src, dst)
    reduced = src.without_partial(axes)
    num_values = math.prod(src.mesh.axis_sizes[axis] for axis in axes)
    stacked = reduced.insert(0, Layout.make(src.mesh, (num_values,), (axes,)))
    gather = Transition(mesh, stacked, stacked.gathered((0,)))
    rest = Transition(
        mesh, reduced, dst, transition.target, src_varying=transition.src_varying,
        dst_varying=transition.dst_varying, order=transition.order,
    )
    return lambda x: rest(functools.reduce(torch.mul, gather(x.unsqueeze(0)).unbind(0)))


def _factor(transition: Transition) -> Way:
    """I -> P(product): the value on coordinate 0, ones elsewhere; all of them keep the edge."""
    target = transition.target
    _, axes = facts.products(transition.src, transition.dst)
    share = Transition(
        transition.mesh, transition.src, transition.dst.without_partial(axes), target,
        src_varying=transition.src_varying, dst_varying=transition.dst_varying.union(axes),
        order=transition.order,
    )
    if target.here is None or not any(target.here[axis] for axis in axes):
        return share
    everywhere = torch.ones((), dtype=torch.bool, device=target.device)
    return lambda x: share(x).masked_fill(everywhere, 1)
