"""The request of a rank for a collective, and the description of a disagreement.

A `CollectiveCall` is one rank's collective as data. Ranks agree if they request the same op over
the same ranks with the same facts (kind, dtype, sizes), and, where both are known, for the same
call and transition. The splits of an all-to-all differ from rank to rank: what i sends to j
must be what j expects of i. `digest` is an image of a request, of six numbers, in which all of this
can be compared. Its last two are sums of hashes, one over what is sent, one over what is expected;
their totals over the group are equal if every pair agrees.

The rooms above know which call a collective serves; they provide it through `PROVIDER`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from weft.comm.source import NOWHERE, Point, line_key, point
from weft.core import AxisName
from weft.errors import message

__all__ = [
    "FIX", "PROCESS", "PROVIDER", "RULE", "CollectiveCall", "Digest", "Switch", "agree", "digest",
    "disagreement", "lines", "pairs_that_differ", "timeout", "told_apart", "who",
]

RULE = (
    "all ranks of a group issue the same collectives in the same order, at the same line, with the "
    "same kind, dtype and sizes"
)
_RULE_OF_REPLICAS = (
    "a plain tensor is taken as replicated, and what is replicated has one value on all of its "
    "ranks"
)
_FIX_OF_REPLICAS = (
    "weft.distribute_module(module, mesh) gives all ranks the first one's parameters, "
    "weft.distribute_tensor(t, mesh) its tensor;\nor make them alike: torch.manual_seed(0) on "
    "every rank before; blocks of a rank's own: weft.ShardTensor.from_local(t, mesh, "
    "[weft.Shard(0)])"
)
FIX = "call on every rank of the group what any of them calls: no `if rank == 0:` around it"

Digest = tuple[int, ...]
"""What all share, the call, the transition, place (each 0 if unknown), sent, expected."""


def timeout() -> timedelta:
    """How long a collective may wait for other ranks: WEFT_TIMEOUT seconds, 300 by default."""
    return timedelta(seconds=float(os.environ.get("WEFT_TIMEOUT", "300")))


_VALUES = "list of digests"
_FACTS = {
    "all_gather": ("dtype", "list of sizes"),
    "all_reduce": ("kind", "dtype", "shape"),
    "all_to_all": ("dtype",),
    "broadcast": ("dtype", "shape", "source"),
    "exchange": (),
    "new_group": (),
    "reduce_scatter": ("kind", "dtype", "list of sizes"),
    "replicas": ("list of tensors", _VALUES),
}
"""The names of the facts of each collective, in the order of `CollectiveCall.facts`."""

_SHOWN = 160
"""Characters of a list of facts in a message."""


class Switch:
    """Whether debug mode is on: one for a process, one for each simulated rank."""

    __slots__ = ("on",)

    def __init__(self, on: bool) -> None:
        self.on = on


PROCESS = Switch(os.environ.get("WEFT_DEBUG", "") not in ("", "0"))
"""That of the process. `WEFT_DEBUG=1` turns it on permanently."""


PROVIDER = SimpleNamespace(asks=lambda: ("", "", ""))
"""`asks()`: the call that communicates, its source line, the transition. Unknown parts are "". Set
by the room that knows."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective as one rank requests it. Equal requests meet."""

    op: str
    axes: tuple[AxisName, ...]
    ranks: tuple[int, ...]  # in mesh order
    facts: tuple[Hashable, ...]
    point: Point = NOWHERE  # the current place in the program
    send: tuple[int, ...] = field(default=(), compare=False)  # of an all-to-all
    recv: tuple[int, ...] = field(default=(), compare=False)
    call: str = field(default="", compare=False)
    call_line: str = field(default="", compare=False)
    transition: str = field(default="", compare=False)
    within: str = field(default="", compare=False)  # where in the line, if messages are to say it

    def by_now(self) -> CollectiveCall:
        """This request with who makes it, and where."""
        call, call_line, transition = PROVIDER.asks()
        return replace(self, call=call, call_line=call_line, transition=transition, point=point())

    def __str__(self) -> str:
        return f"{self.collective} over axes ({self.over}) of ranks {_some(self.ranks)}"

    @property
    def collective(self) -> str:
        """`all_reduce(sum, float32, (2, 3))`"""
        facts = [fact for name, fact in zip(_FACTS[self.op], self.facts) if name != _VALUES]
        return f"{self.op}({_short(', '.join(map(_word, facts)))})"

    @property
    def over(self) -> str:
        """The axes in words."""
        return ", ".join(map(str, self.axes))

    @property
    def reason(self) -> str:
        """Who requests it: `, for full_tensor, P(sum)->I on dp, at train.py:12`"""
        parts = []
        if self.call:
            elsewhere = self.call_line and self.call_line != self.point.line
            parts.append(f"for {self.call}" + (f" at {self.call_line}" if elsewhere else ""))
        if self.transition:
            parts.append(_short(self.transition))
        if self.point.line:
            parts.append(f"at {self.point.line}{self.within}")
        return "".join(f", {part}" for part in parts)


# Comparing.


def digest(ask: CollectiveCall, rank: int) -> Digest:
    """The image of one rank's request."""
    place = ask.ranks.index(rank)
    return (
        _hash((ask.op, ask.axes, ask.ranks, ask.facts)),
        _hash((ask.call, line_key(ask.call_line))) if ask.call else 0,
        _hash(ask.transition) if ask.transition else 0,
        _hash(ask.point.key) if ask.point.key else 0,
        sum(_hash((place, j, size)) for j, size in enumerate(ask.send)),
        sum(_hash((i, place, size)) for i, size in enumerate(ask.recv)),
    )


def agree(digests: Iterable[Digest]) -> bool:
    """Whether the ranks with these digests request the same."""
    shared, call, transition, points, sent, due = zip(*digests)
    same = all(len({*column} - {0}) <= 1 for column in (call, transition, points))
    return len({*shared}) == 1 and same and sum(sent) == sum(due)


def _hash(value: object) -> int:
    return int.from_bytes(
        hashlib.blake2b(repr(value).encode(), digest_size=16).digest(), "little"
    )


# Describing.


def disagreement(asks: Sequence[CollectiveCall], ranks: Sequence[int]) -> str:
    """The error of ranks that came to one collective and request different ones.

    `asks[i]` is that of `ranks[i]`; equal arguments give the same text on every rank.
    """
    asks = told_apart(asks)
    differ = pairs_that_differ(asks[0].ranks, [(ask.send, ask.recv) for ask in asks])
    fact = _first_difference(asks, ranks)
    if fact is None:
        fact = f"{len(differ)} of {len(asks) ** 2} pairs of ranks disagree about what they exchange"
    else:
        differ = []
    if fact == _VALUES:
        return _of_replicas(asks, ranks)
    whose = [(rank, f"asks for {ask.collective}{ask.reason}") for ask, rank in zip(asks, ranks)]
    return message(
        f"collectives over axes ({asks[0].over}), ranks {_some(asks[0].ranks)}",
        fact, RULE, lines([*differ, *who(whose)]), FIX,
    )


def _of_replicas(asks: Sequence[CollectiveCall], ranks: Sequence[int]) -> str:
    """The error of ranks whose replicated values differ."""
    names: Any = asks[0].facts[0]
    values: list[Any] = [ask.facts[1] for ask in asks]
    wrong = []
    for name, of_ranks in zip(names, zip(*values)):
        sides: dict[str, list[int]] = {}
        for value, rank in zip(of_ranks, ranks):
            sides.setdefault(value, []).append(rank)
        if len(sides) > 1:
            wrong.append(f"{name}: " + ", ".join(
                f"{value} on {_ranks(members)}" for value, members in sides.items()
            ))
    first = asks[0]
    which = "a replicated tensor differs" if len(names) == 1 else (
        f"{len(wrong)} of {len(names)} replicated tensors differ")
    return message(
        f"{first.call or 'replicas'} over axes ({first.over}), ranks {_some(first.ranks)}",
        f"{which} from rank to rank, at {first.point.line or 'unknown'}", _RULE_OF_REPLICAS,
        lines(wrong), _FIX_OF_REPLICAS,
    )


def told_apart(asks: Sequence[CollectiveCall]) -> list[CollectiveCall]:
    """The requests; several from one line get their columns, so that they differ."""
    keys: dict[str, set[str]] = {}
    for ask in asks:
        keys.setdefault(line_key(ask.point.line), set()).add(ask.point.key)
    return [
        ask if len(keys[line_key(ask.point.line)]) == 1
        else replace(ask, within=f" (columns {ask.point.columns})")
        for ask in asks
    ]


def _first_difference(asks: Sequence[CollectiveCall], ranks: Sequence[int]) -> str | None:
    """The first thing in which the ranks differ, with who requests what."""
    columns: list[tuple[str, list[str]]] = [
        ("the collective", [ask.op for ask in asks]),
        ("the list of mesh axes", [f"({ask.over})" for ask in asks]),
        ("the order of ranks", [_some(ask.ranks) for ask in asks]),
    ]
    names = _FACTS[asks[0].op]
    if {ask.op for ask in asks} == {asks[0].op}:
        columns += [
            (f"the {name}", [_short(_word(ask.facts[at])) for ask in asks])
            for at, name in enumerate(names)
        ]
    columns += [
        ("the call", [ask.call for ask in asks]),
        ("the transition", [ask.transition for ask in asks]),
        ("the line", [ask.point.line + ask.within for ask in asks]),
        ("the line of the call", [ask.call_line if ask.call else "" for ask in asks]),
    ]
    for name, values in columns:
        sides: dict[str, list[int]] = {}
        shown: dict[str, str] = {}
        for value, rank in zip(values, ranks):
            if value:
                key = line_key(value) if "line" in name else value
                shown.setdefault(key, value)
                sides.setdefault(key, []).append(rank)
        if len(sides) > 1 and name == f"the {_VALUES}":
            return _VALUES
        if len(sides) > 1:
            return f"{name} is " + " and ".join(
                f"{shown[key]} on {_ranks(members)}" for key, members in sides.items()
            )
    return None


def pairs_that_differ(
    ranks: Sequence[int], splits: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> list[str]:
    """The pairs of an all-to-all in which the sent size differs from the expected one.

    `splits[i]` is what rank i of the group sends to each rank, and what it expects of each.
    """
    return [
        f"rank {ranks[i]} sends {sent} to rank {ranks[j]}, which expects {due}"
        for i, (send, _) in enumerate(splits)
        for j, (sent, (_, recv)) in enumerate(zip(send, splits))
        for due in (recv[i] if recv else 0,) if sent != due
    ]


def who(whose: Iterable[tuple[int, str]]) -> list[str]:
    """What ranks do, equal descriptions together: `ranks 1, 2 wait at ...`"""
    doing: dict[str, list[int]] = {}
    for rank, verb in whose:
        doing.setdefault(verb, []).append(rank)
    return [
        f"{_ranks(ranks)} {verb if len(ranks) == 1 else _PLURALS.get(first, first) + space + rest}"
        for verb, ranks in doing.items()
        for first, space, rest in (verb.partition(" "),)
    ]


_PLURALS = {"waits": "wait", "has": "have", "was": "were", "asks": "ask", "stopped": "stopped"}


def lines(offenders: Sequence[str]) -> list[str]:
    """Offenders of a message, one per line."""
    return [("\n" + " " * len("  Offenders: ")).join(offenders)]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_some(ranks)}"


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")


def _word(fact: object) -> str:
    if isinstance(fact, tuple) and fact and all(isinstance(one, str) for one in fact):
        return "; ".join(fact)
    return str(fact).removeprefix("torch.")


def _short(text: str) -> str:
    if len(text) <= _SHOWN:
        return text
    return f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
