"""Zero-bubble schedules: the backward of a pipeline's stage in two passes, for modules on a mesh.

The first pass (`stage_backward_input`) gives the gradients of the stage's inputs. The second
(`stage_backward_weight`) gives those of its weights, later, while the rank would wait for others.
torch's own looks in the graph for the weights, which are wrappers, and takes their gradients out of
it before they are reduced. Also, its order is that of the graph, which is another one where a shard
is empty; ranks would then disagree about the collectives.

Theory of operation. Nodes from which an input is reached run in the first pass. Edges that leave
them for others are the *border*: behind it are weights. Of each node at the border the first pass
keeps the gradients. The second pass runs these nodes again in the same order, as far as the border;
and then, as one backward, all that is behind it. So whatever communicates does so in an order that
the engine has chosen, which ranks share, and partial gradients are reduced at the end, together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import (
    GradientEdge,
    Node,
    _engine_run_backward,
    _get_grad_fn_or_grad_acc,
)

from weft.tensor import ShardTensor
from weft.tensor.grad.autograd import OneBackward, local_of
from weft.tensor.leaves import uses_of
from weft.tensor.placing.freed import memory_of
from weft.transport.nodes import with_gradient

__all__ = ["backward_input", "backward_weight", "detachable"]


def detachable(out: Tensor) -> Tensor:
    """An output that torch may detach in place, to free its graph: not a view."""
    is_view = out.requires_grad and out._is_view()
    return with_gradient(out, Tensor.detach, lambda grad: grad) if is_view else out


def backward_input(
    original: Any, outputs: Sequence[Tensor], grads: Any, inputs: Sequence[Any],
    weights: Iterable[Tensor],
) -> Any:
    """`stage_backward_input`."""
    weights = list(weights)
    if not any(type(one) is ShardTensor for one in weights):
        return original(outputs, grads, inputs, iter(weights))
    border = _Border(outputs, inputs)
    if not border.is_passed or any(memory_of(leaf) for leaf in _leaves(weights)):
        return _backward_at_once(outputs, grads, inputs), []
    with ExitStack() as hooks:
        for node in border.edges:
            hooks.callback(node.register_prehook(border.keeps(node)).remove)
        found, _ = original(outputs, grads, inputs, iter(()))
    return found, [border]


def backward_weight(
    original: Any, weights: Iterable[Tensor], groups: Sequence[Any], *more: Any, **named: Any
) -> Any:
    """`stage_backward_weight`."""
    weights = list(weights)
    if not any(type(one) is ShardTensor for one in weights):
        return original(iter(weights), groups, *more, **named)
    for border in groups:
        with OneBackward() as running:
            border.cross()
            running.flush()
    return tuple(one.grad for one in weights)


def _backward_at_once(outputs: Sequence[Tensor], grads: Any, inputs: Sequence[Any]) -> Any:
    """The first pass of a stage that gathers its parameters, or some of whose outputs depend on no
    input. It is all of the backward: a second one would gather again, or miss those outputs."""
    given = [None] * len(outputs) if grads is None else grads
    wanted = [(out, grad) for out, grad in zip(outputs, given) if out.requires_grad]
    torch.autograd.backward([out for out, _ in wanted], [grad for _, grad in wanted])
    return tuple(one.grad if isinstance(one, Tensor) else None for one in inputs)


class _Border:
    """Nodes at the border, with their edges across it and what has come to them."""

    def __init__(self, outputs: Iterable[Tensor], inputs: Iterable[Any]) -> None:
        ends = {_get_grad_fn_or_grad_acc(leaf) for leaf in _leaves(inputs)}
        on_way: set[Node] = set()
        found: dict[Node, list[GradientEdge]] = {}
        roots = [out.grad_fn for out in map(local_of, outputs) if out.grad_fn is not None]
        for node in _children_first(roots):
            following = dict.fromkeys(node.next_functions)
            if node in ends or any(one in on_way for one, _ in following):
                on_way.add(node)
                found[node] = [
                    GradientEdge(one, at) for one, at in following
                    if one is not None and one not in on_way]
        self.is_passed = all(root in on_way for root in roots)
        self.edges = {node: edges for node, edges in found.items() if edges}
        self.grads: dict[Node, Sequence[Tensor | None]] = {}  # in the order in which they come

    def keeps(self, node: Node) -> Any:
        """A hook that keeps what comes to a node."""
        return lambda grads: self.grads.__setitem__(node, grads)

    def cross(self) -> None:
        """Run the nodes as far as the border, then what is behind it."""
        uses = Counter(chain.from_iterable(self.edges.values()))
        groups: dict[Any, list[Node]] = {}
        for node in self.grads:  # one weight may be used by several
            is_alone = all(uses[edge] == 1 for edge in self.edges[node])
            groups.setdefault(is_alone and node, []).append(node)
        behind: dict[GradientEdge, Tensor] = {}
        for nodes in groups.values():
            edges = tuple(dict.fromkeys(chain.from_iterable(map(self.edges.pop, nodes))))
            found = self._run(nodes, edges)
            behind.update((edge, grad) for edge, grad in zip(edges, found) if grad is not None)
        if behind:
            _engine_run_backward(
                tuple(behind), tuple(behind.values()), False, False, (), allow_unreachable=True,
                accumulate_grad=True)

    def _run(self, nodes: Sequence[Node], edges: tuple[GradientEdge, ...]) -> Any:
        """What comes across these edges. Each node gets what it has got, once: hooks have changed
        it already, and one node may be reached from another."""
        grads = {node: self.grads.pop(node) for node in nodes}
        kept = [(GradientEdge(node, at), grad) for node in nodes
                for at, grad in enumerate(grads[node]) if grad is not None]
        with ExitStack() as hooks:
            for node in nodes:
                hooks.callback(node.register_prehook(lambda _, node=node: grads[node]).remove)
            roots, given = zip(*kept)
            return _engine_run_backward(
                roots, given, True, False, edges, allow_unreachable=True, accumulate_grad=False)


def _children_first(roots: Iterable[Node]) -> Iterator[Node]:
    """All nodes that are reached, each after those that follow it."""
    seen: set[Node | None] = {None}
    line: list[tuple[Any, bool]] = [(root, False) for root in roots]
    while line:
        node, is_done = line.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            line.append((node, True))
            line += [(one, False) for one, _ in node.next_functions]


def _leaves(tensors: Iterable[Any]) -> Iterator[Tensor]:
    """The leaves of the graph in which the gradients of these tensors arrive."""
    for one in tensors:
        if isinstance(one, Tensor) and one.requires_grad:
            local = local_of(one)
            yield local
            yield from (use.seen for use in uses_of(local))  # type: ignore[misc]
