"""`register_rule` and `register_handler`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from weft import rules
from weft.errors import PlacementError, ShardTypeError
from weft.own.check import check_rule
from weft.own.targets import known, overloads_of, own_of
from weft.rules import OwnRule, Pattern, parse
from weft.tensor.call import dispatch
from weft.tensor.call.own.functions import OWN, Own, keys_of
from weft.tensor.grad.torch_patches import OP_BY_OP
from weft.tensor.meta import forget_recipes
from weft.tensor.trace.calls import facts

__all__ = [
    "op_by_op", "register_handler", "register_rule", "unregister_handler", "unregister_rule",
]


def register_rule(
    op: Any,
    pattern: Any = None,
    *,
    linear: Sequence[int | Sequence[int]] = (),
    moves: bool = False,
    nonempty: Sequence[str] = (),
    kernel: Callable[..., Any] | None = None,
    check: Any = False,
) -> Any:
    """Give an op a rule over factors, by which it runs on the local tensors of sharded operands.

    `register_rule(op, "m k, k n -> m n", linear=[0, 1])`, or as a decorator of a function:
    `@register_rule("m k, k n -> m n", linear=[0, 1])`. Operands in other layouts are resharded as
    the rule requires, and gradients are reduced by the gradient rule: the op's own code never
    communicates. An existing rule of the op is replaced.

    Args:
        op: a Python function, an `autograd.Function` subclass, a `torch.library` op
            (`torch.ops.ns.name`, or what `custom_op` returned), or a function of torch.
        pattern: a factor string (see `weft.rules`), with the tensors of a call in order; or
            several, of which the first that fits a call applies; or a function of the call's
            arguments (tensors have `.shape` and `.dtype`) that returns one, or None if the rule
            does not cover the call.
        linear: operands in which the op is linear, each alone (a number) or several together (a
            tuple of numbers): there partial sums pass.
        moves: elements only change position, so partial values of every kind pass.
        nonempty: factors that the op refuses with length 0.
        kernel: `kernel(shards, *args)` runs in place of the op if a dim with `~` in
            the string is sharded: `"b s~ -> b"`. It gets the op's arguments, with local tensors,
            and `shards` (`weft.transport.Shards`), whose `psum`, `pmax`, `pmin` and `gather`
            combine what each shard gives and return it on all ranks. Its results are those of the
            whole op: this rank's shard of a dim that they keep, and the full value for a dim that
            they lack (`s~:sum` if it leaves partial sums).
        check: True, or a tuple of example arguments: runs `check_rule` on the new rule, which is
            discarded if it fails.

    Returns:
        `op`.

    Raises:
        PlacementError: a malformed string, or one that does not fit the op's signature.
        ShardTypeError: an op whose calls do not reach weft.
        LayoutError: from `check`.

    Factor notation is that of einops and of XLA's Shardy (sdy.op_sharding_rule).
    """
    if pattern is None:
        return lambda function: register_rule(
            function, op, linear=linear, moves=moves, nonempty=nonempty, kernel=kernel, check=check
        )
    own = own_of(op, f"register_rule({_text(op)}, ...)")
    strings: Any = pattern if isinstance(pattern, str) or callable(pattern) else tuple(pattern)
    rule = OwnRule(
        own.name, strings,
        tuple([(one,) if isinstance(one, int) else tuple(sorted(one)) for one in linear]),
        moves, frozenset(nonempty), kernel,
    )
    try:
        if rule.by_shape:
            _check_strings(own, rule)
    except PlacementError:
        _drop_if_bare(own)
        raise
    before = own.function.rule
    _set_rule(own, rule)
    if check is not False:
        try:
            check_rule(op, *(() if check is True else check))
        except BaseException:
            _set_rule(own, before)
            raise
    return op


def unregister_rule(op: Any) -> None:
    """Remove the rule of an op, if it has one.

    Args:
        op: what was passed to `register_rule`.
    """
    own = known(op)
    if own is not None:
        _set_rule(own, None)


@overload
def register_handler(op: Any) -> Callable[[Any], Any]: ...
@overload
def register_handler(op: Any, handler: Callable[..., Any]) -> Any: ...
def register_handler(op: Any, handler: Any = None) -> Any:
    """Carry out an op on ShardTensors by a function of your own, where a rule is not enough.

    `register_handler(op, handler)`, or as a decorator of the handler: `@register_handler(op)`.

    Every rank calls `handler` with the arguments of the call: ShardTensors, and plain tensors, as
    they are. It returns ShardTensors (in the containers that the op returns; other values pass),
    whose global value, shape and dtype are those of the op on full tensors, with the same layout on
    all ranks. Or it returns NotImplemented: the call then continues as if there were no handler.
    All ranks must decide and communicate alike, so it may look at layouts, shapes and dtypes, but
    not at local values. Within it, `op` on local tensors is the op itself; on ShardTensors it does
    what it would do without the handler. Gradients are those of the ops that
    it calls: `to_local(grad_placements=...)` and `ShardTensor.from_local` keep the graph.

    Args:
        op: an op of torch or a function of torch, or a user's own op or function.
        handler: called like `op`; None makes a decorator.

    Returns:
        The handler.

    Raises:
        ShardTypeError: an op whose calls do not reach weft, or a handler that cannot be called.
    """
    if handler is None:
        return lambda function: register_handler(op, function)
    if not callable(handler):
        raise ShardTypeError(
            f"register_handler({_text(op)}, handler)", f"handler is {handler!r}",
            "a handler is called as the op is", [type(handler).__name__],
            "register_handler(op, lambda x: ...)")
    own = own_of(op, f"register_handler({_text(op)}, ...)")
    _set_handler(own, handler)
    return handler


def op_by_op(function: Any, enabled: bool | None = True) -> Any:
    """Say whether an `autograd.Function` runs on ShardTensors, one operation after the other.

    `weft.op_by_op(TheFunction)`, or as a decorator of the class. weft reads the source of a
    Function without a rule. If its forward and backward consist of torch's operations, they run on
    ShardTensors, as other PyTorch code does; else they get full tensors. Say it of a Function that
    weft cannot read to the end: it calls what it is given, or code that draws on other packages.

    Args:
        function: a subclass of `autograd.Function`.
        enabled: True, or False for full tensors; None leaves it to the source again.

    Returns:
        `function`.

    Raises:
        ShardTypeError: anything else.
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise ShardTypeError(
            f"op_by_op({_text(function)})", f"it is given a {type(function).__name__}",
            "a subclass of torch.autograd.Function is told to run on ShardTensors; other code "
            "made of torch's operations does by itself", [type(function).__name__],
            "weft.op_by_op(TheFunction)    # the class, not what apply returned")
    if enabled is None:
        OP_BY_OP.pop(function, None)
    else:
        OP_BY_OP[function] = enabled
    return function


def unregister_handler(op: Any) -> None:
    """Remove the handler of an op, if it has one.

    Args:
        op: what was passed to `register_handler`.
    """
    own = known(op)
    if own is not None:
        _set_handler(own, None)


def _set_rule(own: Own, rule: OwnRule | None) -> None:
    if own.function.rule == rule and own.target in OWN:
        return  # every simulated rank registers it
    own.function = own.function_with(rule)
    for one in overloads_of(own):
        rules.OWN.pop(facts(one).functional, None)
        if rule is not None:
            rules.OWN[facts(one).functional] = rule
    _update(own)


def _set_handler(own: Own, handler: Callable[..., Any] | None) -> None:
    own.handler = handler
    for one in keys_of(own.target) if own.signature is None else ():  # torch brings its calls
        dispatch.SPECIAL.pop(one, None)
        if handler is not None:
            dispatch.SPECIAL[one] = own
    _update(own)


def _update(own: Own) -> None:
    if own.target not in OWN:
        OWN.update(dict.fromkeys(keys_of(own.target), own))
    _drop_if_bare(own)
    forget_recipes()


def _drop_if_bare(own: Own) -> None:
    if own.function.rule is None and own.handler is None:
        for key in [key for key, known in OWN.items() if known is own]:
            del OWN[key]
        own.undo()


def _text(op: Any) -> str:
    return getattr(op, "__qualname__", None) or str(op)


# Whether strings fit the op's signature.


def _check_strings(own: Own, rule: OwnRule) -> None:
    for text in (rule.pattern,) if isinstance(rule.pattern, str) else rule.pattern:  # type: ignore[union-attr]
        pattern = parse(text)
        rule.check(pattern)
        for wrong, due in _misfits(own, pattern):
            raise PlacementError(
                f"register_rule({own.name}, {text!r})", wrong,
                "a rule names the dims of every tensor of a call, in order, and of every "
                "tensor that it returns", [due], f'weft.register_rule({own.name}, "...")')


def _misfits(own: Own, pattern: Pattern) -> list[tuple[str, str]]:
    """The impossible parts of a string, and the facts that they contradict."""
    found = []
    overloads = overloads_of(own)
    num_operands, num_results = len(pattern.operands), len(pattern.results)
    if overloads:
        fits = [one for one in overloads if _fits(one, num_operands, num_results)]
        if not fits:
            found.append((f"it has {num_operands} operands and {num_results} results",
                          ", ".join(str(one._schema) for one in overloads)))
    elif own.signature is not None:
        kinds = inspect.Parameter
        parameters = own.signature.parameters.values()
        open_ = any(one.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD) for one in parameters)
        lists = any("[" in str(one.annotation) for one in parameters)  # of several tensors
        if num_operands > len(parameters) and not (open_ or lists):
            found.append((f"it has {num_operands} operands", f"{own.name}{own.signature}"))
    if not overloads:
        told = {name for tensor in pattern.operands for factors in tensor for name in factors}
        asked = {name for tensor in pattern.results for factors in tensor for name in factors}
        unknown = sorted(name for name in asked - told if not name.isdigit())
        if unknown:
            found.append((f"no operand tells the size of {len(unknown)} factors of the results",
                          f'{", ".join(unknown)}: write a number ("b i -> b 3"), or give a '
                          "function of the call's arguments that writes it"))
    return found


def _fits(one: Any, num_operands: int, num_results: int) -> bool:
    """Whether an overload may take and return these numbers of tensors; lists hold any number."""
    arguments = [str(argument.type) for argument in one._schema.arguments]
    needed = arguments.count("Tensor")
    lists = any("List[" in text and "Tensor" in text for text in arguments)
    most = needed + arguments.count("Optional[Tensor]")
    returned = [str(value.type) for value in one._schema.returns]
    results = len(returned) or len(facts(one).writes)
    return (needed <= num_operands and (lists or num_operands <= most)
            and (results == num_results or any("List[" in text for text in returned)))
