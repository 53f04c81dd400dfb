"""A Parameter that becomes a ShardTensor, a plain one, or another ShardTensor, and stays the
same object.

Its module, an optimizer, and modules that share it hold the object, so they see the change.

Theory of operation. Instances of Parameter and ShardTensor have the same structure in memory
(neither class has slots), so the object takes the other's class, attributes and TensorImpl, as in
`torch.utils.swap_tensors`. The new leaf takes over the Parameter's gradient,
its hooks (by the very dicts that their handles know) and its attributes. Graphs that were recorded
before lead to the old leaf, which is no longer visible: their backward is refused. State
that an optimizer has made before is resharded at its next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from weft.comm import BoundMesh
from weft.core import Layout, P
from weft.errors import UnsupportedOpError
from weft.tensor.leaves import before, uses_of
from weft.tensor.placing.marked import Marked
from weft.tensor.placing.operand_cache import forget_views
from weft.tensor.placing.scatter import distribute_tensor
from weft.tensor.shard_tensor import ShardTensor, attributes_of

__all__ = [
    "become_plain", "become_sharded", "exchange", "install", "lay_state_of", "refuse_kinds",
    "take_along",
]


def become_sharded(
    parameter: nn.Parameter, mesh: BoundMesh, layout: Layout, call: str
) -> ShardTensor:
    """Make a Parameter the ShardTensor of this layout.

    Of a plain one, equal on all ranks, each rank keeps its block, and nothing is sent. A
    ShardTensor is resharded, for which all ranks of both meshes must call.

    Returns:
        The same object.

    Raises:
        UnsupportedOpError: something besides Python holds a plain Parameter: a graph that has
            saved it for its backward, or C++ code.
    """
    def laid(x: torch.Tensor) -> torch.Tensor:
        if type(x) is ShardTensor:
            return x.detach().redistribute(mesh, layout)
        return distribute_tensor(x.detach(), mesh, layout, src_data_rank=None)

    return _become(parameter, laid, str(layout), call)


def become_plain(parameter: nn.Parameter, call: str) -> nn.Parameter:
    """Make a Parameter that is a ShardTensor the whole, plain one on every rank: a collective.
    MeshError on a rank outside the mesh, which does not get the value."""
    return _become(parameter, lambda x: x.detach().full_tensor(), "plain", call)


def _become(parameter: Any, laid: Callable[[Any], Tensor], now: str, call: str) -> Any:
    forget_views()  # what weft keeps for the uses of a plain tensor
    requires_grad, grad = parameter.requires_grad, parameter.grad
    was = str(parameter.sharding) if type(parameter) is ShardTensor else "plain"
    nodes = _old_nodes(parameter, call)
    new: Any = nn.Parameter(laid(parameter), requires_grad)
    if grad is not None:
        new.grad = laid(grad)
        parameter.grad = None
    hooks = _take_hooks(parameter)
    exchange(parameter, new)
    _take_attributes(new, parameter)
    _put_hooks(parameter, hooks)
    for node in nodes:
        node.register_prehook(partial(_refuse_graph, tuple(parameter.shape), was, now, call))
    lay_state_of(parameter)
    return parameter


def lay_state_of(parameter: Any) -> None:
    """Reshard the state that optimizers have of it, at their next step."""
    _BECAME.mark(parameter)


def exchange(one: Any, other: Any) -> None:
    """Make each of two tensors the other one; names and references stay."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)  # type: ignore[attr-defined]


def refuse_kinds(parameter: nn.Parameter, call: str) -> None:
    """Raises UnsupportedOpError for Parameters that are lazy, sparse, or of a subclass."""
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
        f"{call}(t)", f"t is a Parameter{shape}, and {fact}",
        "an ordinary dense torch.nn.Parameter becomes a ShardTensor in place",
        [kind.__name__], fix)


def _old_nodes(parameter: Any, call: str) -> list[Any]:
    """The nodes that represent the Parameter in graphs that are alive."""
    if type(parameter) is not ShardTensor:
        return _old_nodes_of_plain(parameter, call)
    if not (parameter.is_leaf and parameter.requires_grad):
        return []
    leaves = [parameter._local, *before(parameter._local)]
    seen = [use.seen for leaf in leaves for use in uses_of(leaf)]
    return [get_gradient_edge(one).node for one in (*leaves, *seen) if one is not None]


def _old_nodes_of_plain(parameter: nn.Parameter, call: str) -> list[Any]:
    """`_use_count` counts who holds the TensorImpl: the Python object, and the node. A graph that
    has saved the value for its backward holds it as well, and so may C++ code (a scripted module).
    """
    count = parameter._use_count()  # type: ignore[attr-defined]
    if count == 1:
        return []
    if count == 2 and parameter.requires_grad:
        node = get_gradient_edge(parameter).node
        if parameter._use_count() == 2:  # type: ignore[attr-defined]  # it was there before
            return [node]
    raise UnsupportedOpError(
        f"{call}(t)", f"t is a Parameter of shape {tuple(parameter.shape)} that "
        f"{count - 1} others hold beside its Python object",
        "a graph that was recorded before the mark leads to the plain tensor, which no "
        "module or optimizer would see any more (so do C++ modules)",
        [f"Parameter {tuple(parameter.shape)}"],
        "mark before the first forward, or after loss.backward(); del loss, outputs")


def _refuse_graph(shape: tuple[int, ...], was: str, now: str, call: str, grads: Any) -> NoReturn:
    """A hook of the old leaf: a graph that reaches it was recorded before the change."""
    raise UnsupportedOpError(
        "backward", f"a Parameter of shape {shape} was {was} when this graph was recorded, and "
        f"{call} has made it {now} since",
        "a graph leads to the tensors of its forward, and nobody would see this gradient",
        [f"Parameter {shape}"], f"{call}(parameter, ...) before the forward, or after backward()")


def take_along(old: Any, new: Any) -> None:
    """Move a user's attributes and hooks to the new tensor; hook handles still remove them."""
    _take_attributes(old, new)
    _put_hooks(new, _take_hooks(old))


def _take_attributes(old: torch.Tensor, new: torch.Tensor) -> None:
    for name, value in attributes_of(old).items():
        if not hasattr(new, name):
            setattr(new, name, value)


_REGISTER = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
"""Where torch keeps hooks of a tensor -> what registers one."""


def _take_hooks(tensor: Any) -> list[tuple[str, Any, dict[int, Any]]]:
    """Take the hooks of a tensor off: for each place, the dict that their handles know, and the
    user's hooks by number."""
    held = tensor._local if type(tensor) is ShardTensor else tensor
    found = []
    for store in _REGISTER:
        known = getattr(held, store)
        if known:
            given = {number: getattr(hook, "given", hook) for number, hook in known.items()}
            setattr(held, store, None)
            known.clear()
            found.append((store, known, given))
    return found


def _put_hooks(tensor: Any, hooks: list[tuple[str, Any, dict[int, Any]]]) -> None:
    """Put them on a tensor."""
    held = tensor._local if type(tensor) is ShardTensor else tensor
    requires_grad = tensor.requires_grad
    for store, known, given in hooks:
        tensor.requires_grad_()  # a frozen one has them, and takes none
        setattr(held, store, known)
        for number, hook in given.items():
            handle = getattr(tensor, _REGISTER[store])(hook)
            known[number] = known.pop(handle.id)
    if hooks:
        tensor.requires_grad_(requires_grad)


def _lay_state(optimizer: Optimizer, parameters: Sequence[tuple[Any, Any]]) -> None:
    """Give existing state the layout of its parameter.

    It was made by the same steps on every rank. State whose shape differs from that of a sharded
    parameter stays as it is, on the mesh of that parameter.
    """
    for parameter, _ in parameters:
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[name] = _laid_as(parameter, value)


_BECAME = Marked(_lay_state)
"""Parameters that have changed their class or their layout."""

install = _BECAME.install


def _laid_as(parameter: Any, value: Any) -> Tensor:
    if type(parameter) is not ShardTensor:
        return value.full_tensor() if type(value) is ShardTensor else value
    mesh, alike = parameter.device_mesh, value.shape == parameter.shape
    if type(value) is ShardTensor:
        if alike:
            return value.redistribute(mesh, parameter.sharding)
        return value if value.device_mesh == mesh else value.redistribute(mesh, P())
    if not alike:
        return value
    return distribute_tensor(value, mesh, parameter.sharding, src_data_rank=None)
