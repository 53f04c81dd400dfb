"""Gradients of ShardTensors: `.grad`, `backward`, `torch.autograd.grad`, hooks.

The graph belongs to the local tensors; here only its ends are converted. The gradient of x
has the dual of x's layout: S for S, I for I, and replicated over axes where x is partial.

torch's anomaly mode checks what each node of the graph returns, and raises at a NaN, in the middle
of the backward. A NaN may be in one rank's block alone: that rank would leave the others waiting in
their next collective. So the check is refused, on all ranks, before the backward begins. The rest
of the mode, the traceback of the forward call where a backward fails, works.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from operator import setitem
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

from weft.comm import this_world
from weft.errors import CommunicationError, LayoutError, UnsupportedOpError
from weft.tensor import modes
from weft.tensor.backward import Backward, completed
from weft.tensor.leaf_gradients import summed
from weft.tensor.leaves import before, uses_of
from weft.tensor.meta import NONE, Meta, is_dense
from weft.tensor.placing.layouts import as_sharded
from weft.tensor.placing.operand_cache import forget_views
from weft.tensor.placing.operands import as_value
from weft.tensor.placing.redistribute import gathered, redistribute_to, to_replicated
from weft.tensor.placing.transitions import transition_between
from weft.tensor.shard_tensor import ShardTensor, version_of, watch_gradient, wrap
from weft.tensor.takeover import twin_of
from weft.tensor.trace.trees import local_of as _local_of
from weft.tensor.views.moved import unwrap_view
from weft.transport.facts import partial_axes
from weft.transport.order import laid, order_due
from weft.transport.transition import Transition

__all__ = [
    "OneBackward", "backward_all", "grad", "grad_meta", "local_cotangent", "metas_of",
    "refuse_nan_check", "set_grad", "wrap_cotangent", "wrap_cotangents", "wrap_grad",
]


def grad_meta(meta: Meta) -> Meta:
    """The Meta of the gradient of such a tensor."""
    made = meta.of_grad
    if made is None:
        strides = meta.strides if is_dense(meta) else None  # of an expanded one, row-major
        layout = meta.layout.without_partial()
        if meta.varying:  # the dual of R
            layout = layout.replace(partial=[
                "sum" if axis in meta.varying else None for axis in range(meta.mesh.ndim)])
        made = meta.of_grad = meta.replace(
            layout=layout, requires_grad=False, alias=None, strides=strides, varying=NONE)
    return made


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that represents this one in autograd's graph."""
    return unwrap_view(_local_of(tensor))


def _num_means(meta: Meta) -> int:
    """The factor between the gradient of such a tensor and that of its local partial value."""
    layout = meta.layout
    kinds = {kind for kind in layout.partial if kind is not None}
    if not kinds <= {"sum", "avg"}:
        raise UnsupportedOpError(
            "x.grad, hooks, torch.autograd.grad", f"x is {layout}",
            "the gradient of a partial sum or mean is that of the value; those of other "
            "partial values depend on each other", [str(layout)],
            "x.redistribute(placements=...), and the gradient of that")
    sizes = zip(layout.partial, layout.mesh.axis_sizes)
    return math.prod([size for kind, size in sizes if kind == "avg"])


def wrap_cotangent(meta: Meta, local: torch.Tensor) -> ShardTensor:
    """The gradient of a tensor that has `meta`, from the local one that autograd holds.

    It has the strides of its tensor, which all ranks know. If the tensor is partial,
    autograd's gradient is R and the user's is I (see `Transition`), which matters only for the
    gradient of the gradient. Partial values of a mean have 1/g of it; a write to their gradient
    would not reach what autograd holds, and raises.
    """
    made = grad_meta(meta)
    if meta.layout.is_partial and (means := _num_means(meta)) != 1:
        local = local * means
        made = made.replace(alias="the gradient of a mean")
    local = _match_order(made, local)
    if not local.requires_grad:
        return wrap(local, made)
    layout, axes = made.layout, partial_axes(meta.layout)
    leave = transition_between(meta.mesh, layout, layout, axes, frozenset())
    local = local if leave is None else leave(local)
    return wrap(local, made.replace(requires_grad=local.requires_grad))


def local_cotangent(meta: Meta, grad: torch.Tensor) -> torch.Tensor:
    """The inverse: what autograd gets for a gradient that the user gives; may communicate."""
    layout, axes = grad_meta(meta).layout, partial_axes(meta.layout)
    local = redistribute_to(as_sharded(grad, meta.mesh), layout)._local
    move_operand = transition_between(meta.mesh, layout, layout, frozenset(), axes)
    local = local if move_operand is None else move_operand(local)
    means = _num_means(meta) if axes else 1
    return local if means == 1 else local / means


def metas_of(tensors: Iterable[Any]) -> list[Meta | None]:
    """The meta of each; None of what is no ShardTensor."""
    return [one._meta if type(one) is ShardTensor else None for one in tensors]


def wrap_cotangents(
    metas: Iterable[Meta | None], locals_: Iterable[torch.Tensor | None]
) -> tuple[Any, ...]:
    """The gradients as the user sees them, of tensors that have these metas."""
    return tuple(
        local if local is None or meta is None else wrap_cotangent(meta, local)
        for meta, local in zip(metas, locals_)
    )


def _match_order(meta: Meta, local: torch.Tensor) -> torch.Tensor:
    """The local gradient in the memory order of its tensor: kernels give any order."""
    if meta.strides is None and local.is_contiguous():
        return local
    due = order_due(meta.shape, meta.stride(), local)
    return local if due is None else laid(local, due)


def wrap_grad(tensor: ShardTensor, local: torch.Tensor) -> ShardTensor:
    """The gradient of `tensor` from the local one; cached as long as the local one exists."""
    lying = _match_order(grad_meta(tensor._meta), local)
    if lying is not local:  # one that is retained: a write to it reaches what autograd holds
        tensor._local.grad = local = lying
    made = wrap_cotangent(tensor._meta, local)
    made._is_gradient = True
    tensor._grad_view = made
    return made


def set_grad(tensor: ShardTensor, grad: torch.Tensor) -> None:
    """`tensor.grad = grad`: redistributed to the gradient's layout; the rest must agree."""
    if not isinstance(grad, torch.Tensor):
        raise TypeError(
            f"assigned grad expected to be a Tensor or None but got grad of type {type(grad)}"
        )
    if grad.shape != tensor.shape or grad.dtype != tensor.dtype:
        raise LayoutError(
            "x.grad = g", f"x is {tensor.dtype} of shape {tuple(tensor.shape)}, g is "
            f"{grad.dtype} of shape {tuple(grad.shape)}",
            "a gradient has the global shape and dtype of its tensor",
            [tuple(grad.shape), grad.dtype], "x.grad = g.to(x.dtype).reshape(x.shape)")
    tensor._local.grad = local_cotangent(tensor._meta, grad)
    if local_of(grad) is tensor._local.grad and type(grad) is ShardTensor:
        tensor._grad_view = grad


def _reduced(output: torch.Tensor) -> torch.Tensor:
    """The output of a backward. Partial values of kinds other than a sum are reduced, because their
    gradient is not that of the value."""
    if type(output) is not ShardTensor:
        return output
    if output._meta.varying:
        return as_value(output)
    if not output._meta.layout.is_partial:
        return output
    layout = output._meta.layout
    if {"sum", None} >= set(layout.partial):
        return output
    with torch.enable_grad():  # it may be a backward within a backward
        return redistribute_to(output, layout.without_partial())


def _seed(output: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The local cotangent of an output."""
    if type(output) is not ShardTensor:
        return local_of(gradient) if gradient is not None else None
    if gradient is not None:
        if gradient.shape != output.shape:
            raise RuntimeError(
                f"Mismatch in shape: gradient of shape {tuple(gradient.shape)} for an output of "
                f"shape {tuple(output.shape)}"
            )
        return local_cotangent(output._meta, gradient)
    if output.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    return torch.ones_like(output._local, memory_format=torch.preserve_format)


def refuse_nan_check(outputs: Sequence[torch.Tensor]) -> None:
    """Called before the engine runs from these outputs: torch would look for NaNs in a graph that
    the ranks share."""
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled() and _is_shared(outputs):
        raise UnsupportedOpError(
            "torch.autograd.detect_anomaly()",
            "a backward of ShardTensors begins, and NaNs are looked for",
            "a NaN may be in one rank's block alone, and all ranks raise or none",
            ["check_nan=True"],
            "torch.autograd.detect_anomaly(check_nan=False), for the tracebacks\n"
            "of a NaN: x.register_hook(lambda g: print(g.isnan().any().item()))")


def _is_shared(outputs: Sequence[torch.Tensor]) -> bool:
    """Whether ShardTensors are among the outputs, or transitions in the graph behind them."""
    if any(type(output) is ShardTensor for output in outputs):
        return True
    seen, line = set(), [output.grad_fn for output in outputs]
    while line:
        node: Any = line.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        moves = (*getattr(node, "transitions", ()), getattr(node, "transition", None),
                 getattr(node, "back", None))
        if any(type(move) is Transition for move in moves):
            return True
        line += [following for following, _ in node.next_functions]
    return False


def _begun(given: Any, gradients: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """The outputs of a backward, those from which it goes, the given gradients, and the local
    ones."""
    known = [given] if isinstance(given, torch.Tensor) else list(given)
    if gradients is None or isinstance(gradients, torch.Tensor):
        gradients = [gradients] * len(known)
    refuse_nan_check(known)
    outputs = [_reduced(output) for output in known]
    return known, outputs, list(gradients), [
        _seed(output, gradient) for output, gradient in zip(outputs, gradients)]


def _is_usual(outputs: Sequence[torch.Tensor], gradients: Sequence[Any]) -> bool:
    """For one real loss without a given gradient, torch's Python has nothing to check or to add, so
    the engine is called directly, which saves as much time as a small linear takes."""
    return (
        len(outputs) == 1 and gradients[0] is None and type(outputs[0]) is ShardTensor
        and outputs[0]._meta.dtype.is_floating_point and not _transforms_are_on()
    )


def _remember_value(output: torch.Tensor, running: Backward) -> None:
    """Make a one-element loss known on every rank, so that a single rank may print it. So are the
    losses that it was made of (see `call.losses`)."""
    if type(output) is not ShardTensor or output.numel() != 1:
        return
    terms, output._terms = output._terms, ()
    for term in terms:
        if term.known[1] is None:
            running.ride(term.local, term.transition, partial(setitem, term.known, 1))
    transition = to_replicated(output._meta)
    if transition is None:  # it is already replicated
        return
    version = version_of(output)

    output._known = known = [version, None]
    if transition.reduction is None:
        known[1] = gathered(output)
    else:
        running.ride(output._local.detach(), transition, partial(setitem, known, 1))


class OneBackward(Backward):
    """A backward leaves nothing behind, whether it succeeds or fails."""

    def __exit__(self, *failed: Any) -> None:
        super().__exit__(*failed)
        forget_views()
        _, error, _ = failed
        if error is not None and not isinstance(error, CommunicationError):
            said = str(error).strip().partition("\n")[0].rstrip(".")
            this_world().stopped(
                f"raised {type(error).__name__}: {said}, in backward, at {modes.source_line()}"
            )


def backward_all(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    **more: Any,
) -> None:
    """`torch.autograd.backward` with ShardTensors among the tensors or inputs."""
    known, outputs, gradients, seeds = _begun(tensors, grad_tensors)
    is_usual = _is_usual(outputs, gradients)
    if isinstance(inputs, torch.Tensor):
        inputs = [inputs]
    local_inputs = None
    if inputs is not None:
        for tensor in inputs:
            watch_gradient(tensor)
        local_inputs = [local_of(tensor) for tensor in inputs]
        local_inputs += [use.seen for local in local_inputs for use in uses_of(local)]
    with OneBackward() as running:
        for output in known:
            _remember_value(output, running)
        locals_ = tuple([local_of(output) for output in outputs])
        if is_usual and local_inputs is None and not more:
            keeps_graph = create_graph if retain_graph is None else retain_graph
            _engine_run_backward(
                locals_, tuple(seeds), keeps_graph, create_graph, (), allow_unreachable=True,
                accumulate_grad=True,
            )
        else:
            _ENGINE_BACKWARD(
                locals_, seeds, retain_graph, create_graph, inputs=local_inputs, **more
            )
        running.flush()


_transforms_are_on = torch._C._are_functorch_transforms_active  # type: ignore[attr-defined]
_ENGINE_BACKWARD: Any = twin_of(torch.autograd.backward)  # type: ignore[arg-type]
_ENGINE_GRAD: Any = twin_of(torch.autograd.grad)  # type: ignore[arg-type]


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad`: gradients in the dual layouts of the inputs."""
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    for tensor in inputs:
        watch_gradient(tensor)
    if is_grads_batched:
        rows = [grad_outputs] if isinstance(grad_outputs, torch.Tensor) else grad_outputs
        return _of_each_row(outputs, inputs, rows, retain_graph, create_graph=create_graph,
                            allow_unused=allow_unused, materialize_grads=materialize_grads)
    _, outputs, _, seeds = _begun(outputs, grad_outputs)
    leaves = [local_of(tensor) for tensor in inputs]
    uses = [uses_of(local) for local in leaves]
    asked = [*leaves, *(use.seen for of_leaf in uses for use in of_leaf)]
    former = _former(leaves)
    with OneBackward(captures=True) as running:
        found = _ENGINE_GRAD(
            [local_of(output) for output in outputs], [*asked, *former], seeds, retain_graph,
            create_graph, allow_unused=allow_unused or bool(former) or any(uses),
            materialize_grads=materialize_grads and not former,
        )
        _check_former(found[len(asked):], inputs)
        local_grads = [
            _seen_by_hooks(local, total, create_graph) if of_leaf else total
            for local, of_leaf, total in zip(leaves, uses, summed(found, uses))
        ]
        running.flush()
        if materialize_grads and former:
            local_grads = [
                torch.zeros_like(local) if total is None else total
                for local, total in zip(leaves, local_grads)
            ]
    unused = any(local is None for local in local_grads)
    if (former or any(uses)) and unused and not (allow_unused or materialize_grads):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set "
            "allow_unused=True if this is the desired behavior."
        )
    return wrap_cotangents(metas_of(inputs), local_grads)


def _of_each_row(
    outputs: Any, inputs: Any, grad_outputs: Sequence[Any], retain_graph: bool | None, **more: Any
) -> tuple[torch.Tensor | None, ...]:
    """`is_grads_batched`: one backward for each row of the gradients, where torch maps one."""
    rows = list(zip(*(torch.unbind(gradient) for gradient in grad_outputs)))
    last = len(rows) - 1
    found = [
        grad(outputs, inputs, list(row), retain_graph if at == last else True, **more)
        for at, row in enumerate(rows)
    ]
    return tuple([None if one[0] is None else torch.stack(one) for one in zip(*found)])


def _former(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves in older graphs of tensors whose layout `x.data = ` has changed since."""
    olds = [old for local in leaves for old in before(local)]
    return [*olds, *(use.seen for old in olds for use in uses_of(old))]  # type: ignore


def _check_former(found: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]) -> None:
    if any(grad is not None for grad in found):
        laid = [str(getattr(one, "sharding", "plain")) for one in inputs if before(local_of(one))]
        raise UnsupportedOpError(
            "torch.autograd.grad(y, x)", "y was computed before `x.data = ` gave x another "
            "layout", "a graph gives gradients in the layouts that its leaves had", laid,
            "y.backward(), which adds to x.grad, or run the forward again")


def _seen_by_hooks(
    local: torch.Tensor, total: torch.Tensor | None, create_graph: bool
) -> torch.Tensor | None:
    """The gradient of a leaf after its hooks, which waited for the gradients of all uses."""
    if total is None or not local._backward_hooks:
        return total
    with completed(local):
        return _ENGINE_GRAD(local, local, total, create_graph=create_graph)[0]
