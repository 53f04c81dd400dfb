"""`torch.optim.Muon`: each matrix is orthogonalized at one rank, its owner.

Momentum and step are elementwise, so they run on each rank's blocks. The Newton-Schulz iteration
(Jordan 2024) takes products of the whole matrix: the blocks of all matrices go to their owners in
one all-to-all, in bfloat16 as the iteration begins, and the results come back in another. The work
is balanced by its multiplications. Matrices of many bytes travel in several buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import (
    _adjust_lr,  # type: ignore[attr-defined]
    _zeropower_via_newtonschulz,  # type: ignore[attr-defined]
)

from weft.comm import BoundMesh
from weft.tensor.grad.optimizers import opened_lists
from weft.tensor.placing.layouts import local_to_sharded
from weft.tensor.placing.states import buckets, from_owners, owners_of, to_owners
from weft.tensor.shard_tensor import ShardTensor
from weft.transport import traffic

__all__ = ["at_owners"]


def at_owners(
    update: Any, params: Any, grads: Any, momenta: Any, **options: Any
) -> None:
    """`update`, Muon's function, on parameters of which some are sharded."""
    lists = (params, grads, momenta)
    opened = None
    if not (options["has_complex"] or options.get("foreach") or _scales_momenta(grads, options)):
        numbers = {name: value for name, value in options.items() if name != "ns_coefficients"}
        opened = opened_lists(lists, numbers)
    if opened is None or any(one.dim() != 2 for one in grads):
        return update(params, grads, momenta, **options)
    sharded = [at for at, one in enumerate(params) if type(one) is ShardTensor]
    plain = [at for at, one in enumerate(params) if type(one) is not ShardTensor]
    if plain:
        update(*([each[at] for at in plain] for each in lists), **options)
    for mesh in {id(params[at]._meta.mesh): params[at]._meta.mesh for at in sharded}.values():
        if mesh.here is None:
            continue
        places = [at for at in sharded if params[at]._meta.mesh is mesh]
        matrices = [params[at] for at in places]
        for some in buckets([2 * one.numel() for one in matrices]):
            chosen = [places[at] for at in some]
            _step(mesh, [grads[at] for at in chosen],
                  [[local[at] for at in chosen] for local in opened], options)


def _scales_momenta(grads: Sequence[Tensor], options: dict[str, Any]) -> bool:
    """Whether torch's iteration writes to the momentum itself: it casts to bfloat16 first, which
    copies nothing if the momentum is bfloat16."""
    return not options["nesterov"] and any(one.dtype is torch.bfloat16 for one in grads)


def _step(
    mesh: BoundMesh, grads: Sequence[Any], opened: Sequence[list[Tensor]], options: dict[str, Any]
) -> None:
    """One step of the matrices of one bucket, from their local parameters, gradients, momenta."""
    momentum, nesterov = options["momentum"], options["nesterov"]
    directions = []
    for _, grad, held in zip(*opened):
        held.lerp_(grad, 1 - momentum)
        directions.append((grad.lerp(held, momentum) if nesterov else held).bfloat16())
    given = [
        local_to_sharded(one, mesh, grad._meta.layout, grad._meta.strides)
        for one, grad in zip(directions, grads)
    ]
    owners, me = owners_of([one.shape for one in grads], mesh.size()), mesh.everyone().index
    with traffic.label("Muon.step", "its iteration is of whole matrices"):
        whole = to_owners(mesh, given, owners)
        for one in [one._local for one, owner in zip(whole, owners) if owner == me]:
            one.copy_(_zeropower_via_newtonschulz(
                one, options["ns_coefficients"], options["ns_steps"], options["eps"]))
        updates = from_owners(mesh, whole, given)
    rate, decay = float(options["lr"]), options["weight_decay"]
    for grad, param, update in zip(grads, opened[0], updates):
        param.mul_(1 - rate * decay)
        param.add_(update._local, alpha=-_adjust_lr(rate, options["adjust_lr_fn"], grad.shape))
