"""A plain Parameter that becomes a ShardTensor, and stays the object that it is.

Its module, an optimizer, and modules that share it hold the object, so they see what became of it.

Theory of operation. Instances of Parameter and ShardTensor are laid out alike in memory (neither
class has slots), so the object takes the other's class, attributes and TensorImpl, as
`torch.utils.swap_tensors` does. What had hung on the Parameter goes to the new leaf: its gradient,
its hooks, by the very dicts that their handles know, and its attributes. Graphs that were recorded
before lead to the leaf that it was, which nobody sees any more: their backward is refused. State
that an optimizer has made before is laid out at its next step.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from weft.comm import BoundMesh
from weft.core import Layout
from weft.errors import UnsupportedOpError, message
from weft.tensor.placing.enter import forget_views
from weft.tensor.placing.scatter import distribute_tensor
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["become_sharded", "install", "refuse_kinds", "take_along"]

_BECAME: Any = WeakTensorKeyDictionary()
"""ShardTensors that were plain Parameters once -> True."""

_COUNT = [0]


def become_sharded(
    parameter: nn.Parameter, mesh: BoundMesh, layout: Layout, call: str
) -> ShardTensor:
    """Make a plain Parameter, equal on all ranks, the ShardTensor of this layout; nothing is sent.

    Returns:
        The same object.

    Raises:
        UnsupportedOpError: something else than Python holds it: a graph that has saved it for its
            backward, or C++ code.
    """
    forget_views()  # what weft keeps for the uses of a plain tensor
    node = _old_node(parameter, call)
    new: Any = nn.Parameter(
        distribute_tensor(parameter.detach(), mesh, layout, src_data_rank=None),
        requires_grad=parameter.requires_grad or _has_hooks(parameter),
    )
    if parameter.grad is not None:
        new.grad = distribute_tensor(parameter.grad.detach(), mesh, layout, src_data_rank=None)
        parameter.grad = None
    take_along(parameter, new)
    new.requires_grad_(parameter.requires_grad)
    if node is not None:
        node.register_prehook(_Left(tuple(parameter.shape), layout, call))
    _exchange(parameter, new)
    became: Any = parameter
    _BECAME[became] = True
    _COUNT[0] += 1
    return became


def _exchange(one: Any, other: Any) -> None:
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)  # type: ignore[attr-defined]


def refuse_kinds(parameter: nn.Parameter, call: str) -> None:
    """Raises UnsupportedOpError for what is no ordinary Parameter: lazy, sparse, of a subclass."""
    kind, grad = type(parameter), parameter.grad
    if kind is not nn.Parameter:
        fact, fix = f"its class is {kind.__name__}", "module.weight = nn.Parameter(module.weight)"
        if is_lazy(parameter):
            fact, fix = "it has no shape yet", "module(batch)  # one forward, before the mark"
    elif parameter.layout is not torch.strided:
        fact, fix = f"it is {parameter.layout}", "module.weight = nn.Parameter(weight.to_dense())"
    elif grad is not None and grad.layout is not torch.strided:
        fact, fix = f"its gradient is {grad.layout}", "optimizer.zero_grad()  # before the mark"
    else:
        return
    shape = "" if is_lazy(parameter) else f" of shape {tuple(parameter.shape)}"
    raise UnsupportedOpError(
        message(f"{call}(t)", f"t is a Parameter{shape}, and {fact}",
                "an ordinary dense torch.nn.Parameter becomes a ShardTensor in place",
                [kind.__name__], fix)
    )


def _old_node(parameter: nn.Parameter, call: str) -> Any:
    """The node of the Parameter in graphs that are alive, None where there are none.

    `_use_count` counts who holds the TensorImpl: the Python object, and that node. A graph that
    has saved the value for its backward holds it as well, as C++ code may (a scripted module).
    """
    count = parameter._use_count()  # type: ignore[attr-defined]
    if count == 1:
        return None
    if count == 2 and parameter.requires_grad:
        node = get_gradient_edge(parameter).node
        if parameter._use_count() == 2:  # type: ignore[attr-defined]  # it was there before
            return node
    raise UnsupportedOpError(
        message(f"{call}(t)", f"t is a Parameter of shape {tuple(parameter.shape)} that "
                f"{count - 1} others hold beside its Python object",
                "a graph that was recorded before the mark leads to the plain tensor, which no "
                "module or optimizer would see any more (so do C++ modules)",
                [f"Parameter {tuple(parameter.shape)}"],
                "mark before the first forward, or after loss.backward(); del loss, outputs")
    )


class _Left:
    """A hook of the leaf that a Parameter was: whoever comes here missed the mark."""

    def __init__(self, shape: tuple[int, ...], layout: Layout, call: str) -> None:
        self.shape, self.layout, self.call = shape, layout, call

    def __call__(self, grads: Any) -> NoReturn:
        raise UnsupportedOpError(
            message("backward", f"a Parameter of shape {self.shape} was plain when this graph was "
                    f"recorded, and {self.call} has made it {self.layout} since",
                    "a graph leads to the tensors of its forward, and nobody would see this "
                    "gradient", [f"Parameter {self.shape}"],
                    f"{self.call}(parameter, mesh, spec) before the forward, or after backward()")
        )


def _has_hooks(tensor: Any) -> bool:
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def take_along(old: Any, new: Any) -> None:
    """What users have hung on a tensor: attributes, and hooks, whose handles still remove them."""
    for name, value in vars(old).items():
        if not hasattr(new, name):
            setattr(new, name, value)
    for store, register in (
        ("_backward_hooks", "register_hook"),
        ("_post_accumulate_grad_hooks", "register_post_accumulate_grad_hook"),
    ):
        known = getattr(old, store)
        if not known:
            continue
        hooks = dict(known)
        setattr(old, store, None)
        known.clear()
        setattr(new._local, store, known)  # the dict that the handles know
        for number, hook in hooks.items():
            handle = getattr(new, register)(hook)
            known[number] = known.pop(handle.id)


def install() -> None:
    """Have the steps of all optimizers looked at. Once per process."""
    register_optimizer_step_pre_hook(_lay_state)


_SEEN: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
"""Optimizers that have stepped -> how many Parameters had become sharded, how many they had."""


def _lay_state(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """State of before the mark comes to lie as its parameter does; nothing is sent.

    It was made by the same steps on every rank. What has another shape stays plain, and whole.
    """
    if not _COUNT[0]:
        return
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    now = _COUNT[0], len(parameters)
    if _SEEN.get(optimizer) == now:
        return
    _SEEN[optimizer] = now
    for parameter in parameters:
        if type(parameter) is not ShardTensor or parameter not in _BECAME:
            continue
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if type(value) is Tensor and value.dim() and value.shape == parameter.shape:
                state[name] = distribute_tensor(
                    value, parameter.device_mesh, parameter.sharding, src_data_rank=None)
