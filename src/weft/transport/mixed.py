"""Transitions in another dtype: data is cast before it is sent, forward and backward.

The casts are in one node with the transition, because autograd casts the gradient of a
node to the dtype of the node's result: separate casts would convert it back in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.comm import Finish
from weft.errors import UnsupportedOpError
from weft.transport.in_flight import in_flight
from weft.transport.nodes import dense
from weft.transport.traffic import STATE, note, resume
from weft.transport.transition import Transition

__all__ = ["Mixed"]


class Mixed:
    """A transition (None: nothing moves) of values cast to `forward`, of gradients to `backward`.

    The gradient returns in the dtype of the source, which is also sent if `backward` is None.
    It has the methods of a `Transition`.

    Raises:
        UnsupportedOpError: when called, if a gradient is wanted for a kind of reduction whose
            gradient is more than a plan.
    """

    __slots__ = ("backward", "communicates", "forward", "transition")

    def __init__(
        self, transition: Transition | None, forward: torch.dtype, backward: torch.dtype
    ) -> None:
        self.transition, self.forward, self.backward = transition, forward, backward
        self.communicates = transition is not None and transition.communicates

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's part, in the dtype `forward`."""
        if self._wants_grad(x):
            return _Apply.apply(x, self, None)  # type: ignore[no-any-return]
        cast = x.to(self.forward)
        return cast if self.transition is None else self.transition(cast)

    def start(self, x: Tensor) -> Tensor:
        """Like a call, but the last collective proceeds: the first use of the result waits."""
        if not self.communicates:
            return self(x)
        assert self.transition is not None
        if not self._wants_grad(x):
            return self.transition.start(x.to(self.forward))
        brings: list[Finish] = []
        out = _Apply.apply(x, self, brings)
        return in_flight(out, x, brings[0])  # type: ignore[arg-type]

    def back(self, grad: Tensor) -> Tensor:
        """The gradient of the source; differentiable."""
        grad = dense(grad).to(self.backward)
        return grad if self.transition is None else self.transition.reverse(grad)

    def _wants_grad(self, x: Tensor) -> bool:
        wants = torch.is_grad_enabled() and x.requires_grad and self.forward.is_floating_point | (
            self.forward.is_complex)
        if wants and self.transition is not None and self.transition.is_special:
            raise UnsupportedOpError(
                "redistribute(forward_dtype=, backward_dtype=)", f"a gradient is wanted "
                f"of {self.transition.text}", "only gradients of sums and means, and of "
                "what is not partial, travel in a dtype of their own",
                [self.transition.text],
                "x.redistribute(placements=...).to(dtype), or x.detach() before it")
        return wants


class _Apply(torch.autograd.Function):
    """A transition between its casts; started only, if a list is given for the finishing calls."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, mixed: Mixed, brings: list[Finish] | None
    ) -> Tensor:
        ctx.mixed, ctx.dtype = mixed, x.dtype
        ctx.note = note() if STATE.on else None
        ctx.set_materialize_grads(False)
        cast, transition = x.to(mixed.forward), mixed.transition
        if transition is None:
            return cast.detach()
        return transition.as_node(cast) if brings is None else transition._begin(cast, brings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:  # type: ignore[override]
        if grad is None:
            return None, None, None
        if STATE.on and ctx.mixed.transition is not None:
            with resume(ctx.note, f"gradient of {ctx.mixed.transition.text}"):
                return ctx.mixed.back(grad).to(ctx.dtype), None, None
        return ctx.mixed.back(grad).to(ctx.dtype), None, None
