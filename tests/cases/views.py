"""Writes through views, and views of what is written to: live ones, and those whose data move."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.cases import Case, case, reals

View = Callable[[Tensor], Tensor]

VIEWS: dict[str, View] = {
    "view": lambda x: x.view(4, 6),
    "view_dims": lambda x: x.view(2, 3, 4),
    "view_flat": lambda x: x.view(-1),
    "view_as": lambda x: x.view_as(torch.empty(8, 3)),
    "view_dtype": lambda x: x.view(torch.int64).view(torch.float64),
    "view_bits": lambda x: x.view(torch.int32).view(torch.float64),
    "reshape": lambda x: x.reshape(3, 8),
    "reshape_of_t": lambda x: x.t().reshape(24),
    "reshape_of_columns": lambda x: x[:, 1:3].reshape(12),
    "reshape_of_rows": lambda x: x[2:4].reshape(8),
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: x.ravel(),
    "unflatten": lambda x: x.unflatten(0, (3, 2)),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.view(2, 3, 4).permute(2, 0, 1),
    "movedim": lambda x: x.view(2, 3, 4).movedim(0, 2)[1],
    "swapaxes": lambda x: x.swapaxes(0, 1)[1],
    "mT": lambda x: x.mT,
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[2:3].squeeze(0),
    "expand_nothing": lambda x: x.expand(6, 4),
    "select": lambda x: x.select(0, 1),
    "select_column": lambda x: x.select(1, -1),
    "row": lambda x: x[-1],
    "element": lambda x: x[2, 3],
    "column": lambda x: x[:, 1],
    "mixed_index": lambda x: x[1, None, 1:3],
    "narrow": lambda x: x.narrow(0, 1, 3),
    "step": lambda x: x[1::3, ::2],
    "split": lambda x: x.split(4)[1],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "tensor_split": lambda x: x.tensor_split(4)[1],
    "hsplit": lambda x: x.hsplit(2)[1],
    "vsplit": lambda x: x.vsplit([2, 3])[2],
    "dsplit": lambda x: x.view(2, 3, 4).dsplit(2)[1],
    "unbind": lambda x: x.unbind(0)[2],
    "unbind_columns": lambda x: x.unbind(1)[2],
    "diagonal": lambda x: x.diagonal(1),
    "diagonal_below": lambda x: x.diagonal(-3),
    "diagonal_of_3d": lambda x: x.view(2, 3, 4).diagonal(1, 2, 1),
    "unfold": lambda x: x.unfold(0, 2, 2),
    "unfold_columns": lambda x: x.unfold(1, 2, 2),
    "contiguous": lambda x: x.contiguous(),
    "contiguous_of_t": lambda x: x.t().contiguous(),
    "contiguous_columns": lambda x: x[:, :2].contiguous(),
    "detached_row": lambda x: x.detach()[1],
    "row_detached": lambda x: x[1].detach(),
    "row_of_data": lambda x: x.data[1],
    "data_of_row": lambda x: x[1].data,
    "row_as_matrix": lambda x: x[1].view(2, 2)[0],
    "row_of_columns": lambda x: x.t()[1:3].unsqueeze(0)[0, :, 2:5],
    "moved_twice": lambda x: x.view(4, 6)[1:3].t()[2],
    "steps_of_flat": lambda x: x.view(-1)[3:17:2],
    "broadcast": lambda x: torch.broadcast_tensors(x, x[0])[0],
    "real_column": lambda x: torch.view_as_complex(x.view(6, 2, 2)).real[:, 1],
    "imag_row": lambda x: torch.view_as_complex(x.view(6, 2, 2)).imag[1],
    "conj_row": lambda x: torch.view_as_complex(x.view(6, 2, 2)).mH[1].imag,
}

WRITES: dict[str, Callable[[Tensor], object]] = {
    "mul": lambda view: view.mul_(2),
    "add": lambda view: view.add_(torch.arange(1.0, view.numel() + 1).double().view(view.shape)),
    "zero": lambda view: view.zero_(),
    "set": lambda view: view.__setitem__(..., 3.0),
    "negate": lambda view: view.neg_(),
}

_SEVERAL = ("split", "chunk", "unbind", "unbind_columns")
"""Of a function with several views as its result: torch refuses to write to one, recorded."""


def _through(view: View, write: Callable[[Tensor], object], again: bool) -> Callable[..., object]:
    """A write to the view, then one to the base: what both show after each of them."""

    def fn(a: Tensor) -> list[Tensor]:
        base = a.clone()
        shown = view(base)
        write(shown)
        seen = [base * 1, shown * 1]
        base.mul_(3)
        if again:
            seen.append(shown.clone())
            shown.add_(1)
        return [*seen, base, shown, view(base)]

    return fn


CASES: list[Case] = []
for _place, (_name, _view) in enumerate(VIEWS.items()):
    for _grad in (False, True):
        if _grad and _name in _SEVERAL:
            continue
        _write = list(WRITES)[(_place + _grad) % len(WRITES)]
        CASES.append(case(
            f"{_write}_through_{_name}{'' if _grad else '_no_grad'}",
            _through(_view, WRITES[_write], not _grad), reals(6, 4, laid=True), grad=_grad,
            per_mesh=2,
        ))
