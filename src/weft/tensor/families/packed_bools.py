"""Bools are sent from one layout to another as bits, eight to a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.indexing.row_exchange import RowExchange
from weft.planner.geometry import intersect, volume
from weft.transport.boxes import part, unpack

__all__ = ["can_send_packed", "send_packed"]


def can_send_packed(src: Layout, dst: Layout) -> bool:
    """Whether `send_packed` serves: the same axes shard both."""
    return src != dst and not src.is_partial and not dst.is_partial and (
        set(src.sharded_axes) == set(dst.sharded_axes)
    )


def send_packed(
    mesh: BoundMesh, name: str, mask: Tensor, src: Layout, dst: Layout
) -> Tensor:
    """The local part of a mask in another layout, by one all-to-all of packed boxes."""
    assert mesh.here is not None
    axes = tuple(sorted(src.sharded_axes))
    there = mesh.along(axes, mesh.here)
    mine, wanted = src.box_at(mesh.here), dst.box_at(mesh.here)
    sent = [
        _packed(mask.reshape(-1)[:0] if box is None else part(box, mine)(mask))
        for box in (intersect(mine, dst.box_at(place)) for place in there)
    ]
    boxes = [intersect(src.box_at(place), wanted) for place in there]
    sizes = [0 if box is None else volume(box) for box in boxes]
    counts = [-(-size // 8) for size in sizes]
    rows = RowExchange(mesh.comm(axes), name)
    got = rows.all_to_all(torch.cat(sent), list(map(len, sent)), counts)
    bits = torch.cat([
        _unpacked(each)[:size] for each, size in zip(got.split(counts), sizes)
    ])
    return unpack([box for box in boxes if box is not None], wanted, None)(bits, None)


def _packed(mask: Tensor) -> Tensor:
    bits = mask.reshape(-1).to(torch.uint8)
    eights = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (eights << _places(mask)).sum(1, dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Tensor:
    return (packed.unsqueeze(1) >> _places(packed) & 1).view(-1).bool()


def _places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
