"""Rules that users register for their own ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import LayoutError, PlacementError
from weft.rules.bind import bind, result_shapes
from weft.rules.call import Call, TensorArg
from weft.rules.factors import linear_sets
from weft.rules.notation import Pattern, parse
from weft.rules.rule import Rule

__all__ = ["OWN", "OwnRule"]


@dataclass(frozen=True, slots=True)
class OwnRule:
    """A user's description of an op.

    Args:
        name: the op, for messages.
        pattern: a factor string; or several, of which the first that fits applies; or a function of
            the call's arguments, with `TensorArg` for tensors, that gives a string (None: the
            rule does not cover this call).
        linear: sets of operands in which the op is jointly linear.
        moves: elements only change position.
        nonempty: factors that the op refuses with length 0.
        kernel: runs on the shards of dims with `~`.
    """

    name: str
    pattern: str | tuple[str, ...] | Callable[..., str | None]
    linear: tuple[tuple[int, ...], ...] = ()
    moves: bool = False
    nonempty: frozenset[str] = frozenset()
    kernel: Callable[..., Any] | None = None

    @property
    def by_shape(self) -> bool:
        """Whether the numbers of operands and dims alone determine which string applies."""
        return not callable(self.pattern)

    def patterns(self, call: Call) -> Iterator[Pattern]:
        """The strings that may apply to this call."""
        found: Any = self.pattern
        if callable(found):
            found = found(*call.args, **call.kwargs)
        if isinstance(found, str):
            found = (found,)
        for text in found or ():
            pattern = parse(text)
            self.check(pattern)
            yield pattern

    def check(self, pattern: Pattern) -> None:
        """Raise PlacementError if `linear` or `nonempty` name something that is not in the string,
        or if the kind of reduction is a mean."""
        count = len(pattern.operands)
        wrong = [f"linear={members}" for members in self.linear
                 if not all(0 <= member < count for member in members)]
        if wrong:
            raise _malformed(pattern, f"it has {count} operands, numbered from 0", wrong,
                             "linear=[0, 1]: linear in each of two; [(0, 1)]: in both at once")
        names = {name for tensor in pattern.operands for factors in tensor for name in factors}
        wrong = [name for name in sorted(self.nonempty) if name not in names]
        if wrong:
            raise _malformed(pattern, f"no operand has {len(wrong)} of the factors in nonempty=",
                             wrong, f"nonempty={sorted(names - {'...', '1'})[:1]}")
        marked = sorted(f"{name}~" for _, name in pattern.finish)
        if marked and self.kernel is None:
            raise _malformed(pattern, f"{len(marked)} factors stand with ~, and there is no kernel "
                             "that finishes what their shards give", marked,
                             "kernel=, a function (shards, *args) of local tensors; or s!")
        windows = sorted(name for _, name in (*pattern.windows, *pattern.spreads))
        if windows:
            raise _malformed(pattern, f"{len(windows)} of its dims are windows, and the op would "
                             "pad boxes that are padded", windows, '"b y! -> b z"')
        wrong = [f"{name}:avg" for name, kind in pattern.reduce.items() if kind == "avg"]
        if wrong:
            raise _malformed(pattern, "a mean over shards of other lengths is no mean of their "
                             "means", wrong, "give the sum, and divide by the global length after")

    def bind(self, call: Call, results_known: bool) -> tuple[Rule, tuple[TensorArg, ...]] | None:
        """The rule for a call, and what it says of the results; None if it does not cover the call.

        If `results_known` is false, the shapes of the results are those of the string,
        and their dtype is not known ("").

        Raises:
            LayoutError: no string fits the operands.
        """
        shapes = [tensor.shape for tensor in call.tensors]
        misfits: list[LayoutError] = []
        for pattern in self.patterns(call):
            try:
                results = call.results if results_known else tuple(
                    TensorArg(shape, "") for shape in result_shapes(pattern, shapes)
                )
                linear = self.linear if not results_known or not results else linear_sets(
                    self.linear, call.tensors, results[0]
                )
                found = bind(
                    pattern, shapes, [result.shape for result in results],
                    linear=tuple([tuple(sorted(members)) for members in linear]),
                    moves=self.moves, nonempty=self.nonempty,
                )
            except LayoutError as misfit:
                misfits.append(misfit)
            else:
                return found, results
        if len(misfits) == 1:
            raise misfits[0]
        if misfits:
            raise LayoutError(
                f"the rules of {self.name}", f"operands of shapes {shapes} fit none of "
                f"{len(misfits)} strings", "one of the strings names every dim of every "
                "tensor operand and result",
                [str(misfit).splitlines()[0] for misfit in misfits],
                "weft.register_rule(op, [..., another string])")
        return None


def _malformed(pattern: Pattern, facts: str, offenders: Sequence[str], fix: str) -> PlacementError:
    return PlacementError(
        f"register_rule(op, {pattern.text!r})", facts,
        "options name operands and factors of the string", offenders,
        fix)


OWN: dict[str, OwnRule] = {}
"""The rules of ops that torch knows by name: "ns.op.overload" of the op that is not in place."""
