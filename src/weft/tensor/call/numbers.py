"""Tensors that stand for numbers (`alpha=`, `value=`, lengths) are read before the call goes on.

A sharded one is read by a collective. The numbers may decide what follows, so the call is looked up
again with the numbers in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from weft.tensor.trace.capture import meta_like
from weft.tensor.trace.trees import flatten, substitute

__all__ = ["CarryOut", "check", "places_of", "reading"]

CarryOut = Callable[[Any, Any, Any], Any]
"""What carries out a call: of the function, its arguments and its keywords."""

_MAX_NUMBERS = 3


def places_of(
    args: Any, kwargs: Any, takes: Callable[[Any, Any], object]
) -> Sequence[int]:
    """The tensors of a call that stand for numbers; never the first operand.

    Found by trial: the fewest in whose places the function `takes` numbers (else it raises). If
    none will do, integers on which shapes may depend. torch takes no tensor that requires a
    gradient for a number.
    """
    tensors = flatten((args, kwargs))
    first = args[0] if args else None
    places = [at for at, one in enumerate(tensors) if one is not first and not one.shape]
    fixed = [at for at in places if not tensors[at].requires_grad]
    for num in range(1, min(len(fixed), _MAX_NUMBERS) + 1):
        for some in combinations(fixed, num):
            tried: list[Any] = list(tensors)
            for at in some:
                tried[at] = 0.5 if tensors[at].dtype.is_floating_point else 1
            try:
                takes(*substitute((args, kwargs), iter(tried)))
            except Exception:  # torch takes no number there, not this one, or reads others, too
                continue
            return some
    return [
        at for at in places
        if not (tensors[at].dtype.is_floating_point or tensors[at].dtype.is_complex)
    ]


def reading(places: Sequence[int], carry_out: CarryOut) -> CarryOut:
    """The recipe that reads the tensors in these places, and carries out the call with numbers."""
    def run(func: Any, args: Any, kwargs: Any) -> Any:
        feed: list[Any] = list(flatten((args, kwargs)))
        for at in places:
            feed[at] = feed[at].item()
        return carry_out(func, *substitute((args, kwargs), iter(feed)))

    return run


def check(func: Any, args: Any, kwargs: Any) -> None:
    """Raise torch's own error where a tensor that wants a gradient stands for a number."""
    tensors = flatten((args, kwargs))
    if not any(tensor.requires_grad and not tensor.shape for tensor in tensors):
        return
    metas = [meta_like(tensor).requires_grad_(tensor.requires_grad) for tensor in tensors]
    args, kwargs = substitute((args, kwargs), iter(metas))
    try:
        func(*args, **kwargs)
    except TypeError:
        raise
    except Exception:  # it reads the data of others
        return
