"""An all-to-all among the ranks of a group, as a node of autograd's graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch._C import _DisableAutocast  # type: ignore[attr-defined]

from weft.comm import Communicator
from weft.transport import traffic
from weft.transport.nodes import with_gradient

__all__ = ["AllToAll", "in_line"]


def in_line(parts: Sequence[Tensor]) -> Tensor:
    """The elements of all parts of one tensor, part by part, as a flat tensor.

    Its gradient reaches the tensor also where no part has elements (not so by torch's `cat`): such
    ranks take part in the second derivative. Other parts without elements are left out, as the
    gradient of each would be as large as the tensor.
    """
    some = [part.reshape(-1) for part in parts if part.numel()]
    return torch.cat(some) if len(some) > 1 else some[0] if some else parts[0].reshape(-1)


class AllToAll:
    """Sends rows between the ranks of a group; `what` they are, and what their gradients are, is
    told to those who ask for the traffic."""

    __slots__ = ()

    comm: Communicator
    what: ClassVar[str]
    of_gradient: ClassVar[str]

    def all_to_all(self, x: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
        """Rows of `x`, `send[i]` of them to each rank i; returns those received, by rank."""
        row, comm = math.prod(x.shape[1:]), self.comm
        nbytes = (sum(recv) - recv[comm.index]) * row * x.element_size()
        with traffic.sending(comm, self.what, "AllToAll", nbytes), _DisableAutocast():
            got = comm.all_to_all(
                x.detach().contiguous().view(-1), [count * row for count in send],
                [count * row for count in recv])
        return got.view(sum(recv), *x.shape[1:])

    def send(self, x: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
        """`all_to_all`, differentiable to any order."""
        if x.requires_grad and torch.is_grad_enabled():
            return with_gradient(
                x, lambda x: self.all_to_all(x, send, recv),
                lambda grad: self.send(grad, recv, send), why=self.of_gradient)
        return self.all_to_all(x, send, recv)
