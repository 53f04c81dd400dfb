"""Which candidate a mesh axis takes: the cheapest way to bring the operands together.

Theory of operation. Over one axis a rule allows three things: shard a factor; let partial sums pass
through a linear set of operands; or replicate. Each candidate requires something of every operand.
The table of transitions gives the cost, in bytes received per rank:

    from      to S(same)  to S(other)    to replicated       to P
    S         0           n/g + back     n + back             2n
    P         n + back    n + back       2n + back if varying 0, or 4n for another kind
    replic.   0           0              0                    2n

each times (1 - 1/g), or what the busiest rank receives of an uneven dim. "back" is the same
again if the operand needs a gradient. Further rules:

- The gradient of a replicated operand counts as free. It is reduced where the operand is used
  whole, and gathered where a shard of it is used. It follows from the user's choice of layout, and
  counting it would undo data parallelism for small batches.
- A value that becomes one rank's partial value (to P) pays the reduction that this makes
  necessary. So when a replicated value meets a partial one, the partial one is reduced.
- A candidate that leaves partial values although something has to move pays their reduction too.
  This applies to partial values beside an operand that would be gathered for them, and to a
  contraction for which an operand would have to be resharded or sliced, or another one gathered
  (ids of a batch, for rows of a table that the batch's axis shards). What such a candidate saves in
  moving one operand, the result must pay: each rank holds a partial value of
  full size.
- An in-place op also pays for moving its target back.
- A view that merges dims has one leading factor. An operand that is sharded by another factor moves
  to the leading one, rather than to a separate dim, from which it would have to come back.
- Replicating a sharded operand leaves every rank with the whole result and with all further work.
  This candidate also pays the bytes of the result, once for forward and once for backward, at
  most the size of what was sharded; or of the result what is larger than any whole operand, as of
  an outer product.
- Replicating a partial value has no price. With a gradient it costs what sharding costs, and then
  it is replicated: a tensor-parallel block with a norm after its linears would move 1.4 times as
  much by shards, as the next linear gathers them.
- A kernel that combines the shards of a dim and leaves its results whole (a maximum with its place)
  pays their reduction, and what a whole result costs. Over a short dim results are as large as a
  shard, and the operand moves to another dim instead.
- A factor with fewer elements than the axis has ranks leaves some of them idle. It pays what the
  busiest rank then holds of the result beyond its share, in the same way.
- Cuts by which one rank has all of a factor are kept where nothing is compared, or the op does no
  more than what is there: other ops would leave all ranks but one idle, and cut it evenly.
- Pairs (`x[:, None] - x`) stay with one of their operands. Sharding another factor, such as the
  coordinates, may move fewer bytes. But coordinates are summed next, which leaves a partial value
  of all pairs on each rank. So it also pays the exchange that brings the pairs back.
- A windowed operand that stays sharded costs the halo, there and back.
- Where all operands agree on a factor, or on the partial values of a linear set, nothing moves and
  nothing is compared.

An axis of size 1 is treated as one of size 2: a program sees the same layouts on any number of
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.core import Layout
from weft.rules import Rule

__all__ = [
    "NEEDS_COST", "UNKNOWN_FACTOR", "Choice", "Frame", "PassPartial", "Slices", "cheapest",
    "cut_beside", "bias_operands", "zero_cost_choice",
]

UNKNOWN_FACTOR = ""
"""Stands for the factor of a sharded dim for which the rule has no factor."""


@dataclass(frozen=True, slots=True)
class PassPartial:
    """Partial values of `kind` pass: the members are partial, the other operands replicated."""

    members: tuple[int, ...]
    kind: str


Slices = Sequence[tuple[Layout, tuple[int, ...]] | None]
"""Per operand: None, or the layout of what it is a slice of, and where it begins there."""

Choice = str | PassPartial | None
"""What an axis does: shard a factor, pass partial values, or nothing."""

NEEDS_COST = PassPartial((), "")
"""No candidate costs nothing."""


@dataclass(slots=True)
class Frame:
    """One call as propagation sees it.

    Args:
        rule: its rule.
        results: bytes of all results.
        leads: per factor, where it leads a dim: (operand, dim, product of the dim's other factors).
        barred: factors that cannot be sharded.
        finished: per factor whose shards the op's kernel combines, the operands in which it may be
            sharded.
        held: per axis, per operand: the factor that the axis shards, UNKNOWN_FACTOR, or None.
        kinds: per axis, per operand: the kind of its partial values; None for an axis without any.
        nbytes: per operand, bytes of what one rank holds of it.
        grads: per operand, whether its gradient is wanted.
        sizes: of the mesh axes.
        target: the operand that the call writes to; its new value is moved back to its layout.
        beside: factor -> another one, and the operands in which axes that shard that other one may
            shard the factor.
        slices: per operand; () if none is a slice.
    """

    rule: Rule
    results: int
    leads: dict[str, list[tuple[int, int, int]]]
    barred: set[str]
    finished: dict[str, list[int]]
    held: list[list[str | None]]
    kinds: list[list[str | None] | None]
    nbytes: list[float]
    grads: Sequence[bool]
    sizes: tuple[int, ...]
    target: int | None = None
    beside: dict[str, tuple[str, list[int]]] = field(
        default_factory=dict[str, tuple[str, list[int]]]
    )
    slices: Slices = ()


def bias_operands(frame: Frame, factor: str) -> tuple[int, ...]:
    """The operands that are added to the result of a contraction of `factor`.

    The rule names them; or they lack the factor, and are in one linear set with an operand that has
    it. If the factor is sharded, the result is a partial sum, and one rank alone adds them.
    """
    rule = frame.rule
    if rule.reduce.get(factor) != "sum" or len(rule.operands) == 1:
        return ()
    owners = {operand for operand, _, _ in frame.leads[factor]}
    return tuple(sorted({*rule.bias, *(
        member for members in rule.linear if not owners.isdisjoint(members)
        for member in members if member not in owners
    )}))


def zero_cost_choice(frame: Frame, axis: int) -> Choice:
    """The candidate for which nothing moves over one axis, or NEEDS_COST; lengths do not matter."""
    held, kinds = frame.held[axis], frame.kinds[axis]
    return _agreed(frame, held) if kinds is None else _passing(frame, held, kinds)


def _agreed(frame: Frame, held: Sequence[str | None]) -> Choice:
    """The factor that all operands with it have sharded, the others being replicated: no cost."""
    found: str | None = None
    for name in held:
        if name is not None:
            if found is None:
                found = name
            elif name != found:
                return NEEDS_COST
    if found is None:
        return None
    if found == UNKNOWN_FACTOR or found in frame.barred:
        return NEEDS_COST
    if found in frame.beside and frame.rule.sizes[frame.beside[found][0]] > 1:
        return NEEDS_COST  # the other factor may be sharded instead, which leaves less whole
    for operand, _, _ in frame.leads[found]:
        if held[operand] != found:
            return NEEDS_COST
    if found in frame.finished and (
        _leaves_whole(frame, found) or not _is_brought(frame, held, found)
    ):
        return NEEDS_COST
    return NEEDS_COST if found in frame.rule.reduce and bias_operands(frame, found) else found


def cut_beside(frame: Frame, held: Sequence[str | None], choice: Choice) -> Iterator[str]:
    """The factors that an axis shards beside its own: those that operands have sharded in this
    way."""
    for factor, (other, operands) in frame.beside.items():
        if choice == other and any(held[operand] == factor for operand in operands):
            yield factor


def _is_brought(frame: Frame, held: Sequence[str | None], factor: str) -> bool:
    """Whether an operand that may bring the factor sharded does so."""
    return any(held[operand] == factor for operand in frame.finished[factor])


def _leaves_whole(frame: Frame, factor: str) -> bool:
    """Whether a kernel that combines the shards of a factor leaves whole results that have dims."""
    if factor not in frame.finished or factor in frame.rule.reduce or factor in frame.beside:
        return False
    leads = {factors[0] for dims in frame.rule.results for factors in dims if factors}
    return bool(leads) and factor not in leads


def _may_finish(
    frame: Frame, held: Sequence[str | None], kinds: Sequence[str | None], factor: str
) -> bool:
    """Whether the kernel may get the factor sharded: an operand brings it sharded, or an operand
    that may do so has to move and the kernel leaves partial values. Nothing is sharded only for a
    kernel."""
    return _is_brought(frame, held, factor) or (factor in frame.rule.reduce and any(
        held[operand] is not None or kinds[operand] is not None
        for operand in frame.finished[factor]
    ))


def _passing(
    frame: Frame, held: Sequence[str | None], kinds: Sequence[str | None]
) -> Choice:
    """The linear set whose members are all partial while the others are replicated: no cost."""
    if any(name is not None for name in held):
        return NEEDS_COST
    partial = tuple([index for index, kind in enumerate(kinds) if kind is not None])
    kind = kinds[partial[0]]
    assert kind is not None
    if partial in frame.rule.linear and _may_pass(frame.rule, kind) and all(
        kinds[index] == kind for index in partial
    ):
        return PassPartial(partial, kind)
    return NEEDS_COST


def _may_pass(rule: Rule, kind: str) -> bool:
    return rule.moves or kind == "sum" or kind == "avg"


def _may_become(kind: str, held: str | None) -> bool:
    """Whether the table of transitions has a row to P(`kind`): S and I become P(sum), only I
    becomes P of another kind, nothing becomes a mean."""
    return kind == "sum" or (kind != "avg" and held is None)


def cheapest(frame: Frame, axis: int, shards: Mapping[str, int]) -> Choice:
    """The candidate that moves the fewest bytes over one axis; ties as in `_key`.

    `shards`: into how many shards the other axes divide each factor.
    """
    rule, held, size = frame.rule, frame.held[axis], max(frame.sizes[axis], 2)
    kinds = frame.kinds[axis] or (None,) * len(held)
    # What one rank would hold of each operand if this axis sharded nothing.
    nbytes = [
        own * frame.sizes[axis] if name is not None else own
        for own, name in zip(frame.nbytes, held)
    ]
    best: Choice = None
    best_key = _key(frame, nbytes, held, kinds, (None,) * len(held), size, None)
    sharded = sum([own for own, name in zip(nbytes, held) if name is not None])
    whole = max([own for own, name in zip(nbytes, held) if name is None], default=0)
    made, ways = _result_nbytes(frame, axis), 2 if True in frame.grads else 1
    repeated = made * ways
    are_pairs = not rule.reduce and made > sum(nbytes) and _can_stay(frame, held)
    if sharded:  # a partial value is replicated without a price
        repeated = min(made, max(sharded, made - whole)) * ways
        best_key = (best_key[0] + repeated, *best_key[1:])
    for candidate, wanted in _candidates(frame, held, kinds, shards, size):
        key = _key(frame, nbytes, held, kinds, wanted, size, candidate)
        if isinstance(candidate, PassPartial) or (candidate in rule.reduce and any(
            kind is not None or name != target if candidate == target else target is None and name
            for name, kind, target in zip(held, kinds, wanted)
        )):
            key = (key[0] + 2 * _result_nbytes(frame, axis), *key[1:])
        if isinstance(candidate, str) and 0 < rule.sizes[candidate] < size:
            key = (key[0] + repeated * (1 / rule.sizes[candidate] - 1 / size), *key[1:])
        if are_pairs and isinstance(candidate, str) and candidate not in held:
            key = (key[0] + made * ways / size, *key[1:])
        if isinstance(candidate, str) and _leaves_whole(frame, candidate):
            key = (key[0] + 2 * made * ways + repeated, *key[1:])
        if frame.beside:
            key = (key[0] + _of_kernel(frame, nbytes, held, axis, candidate), *key[1:])
        if key < best_key:
            best, best_key = candidate, key
    return best


def _can_stay(frame: Frame, held: Sequence[str | None]) -> bool:
    """Whether the axis shards operands, by factors that may all remain sharded in the result."""
    names = [name for name in held if name is not None]
    kept = {factor for dims in frame.rule.results for factors in dims for factor in factors[:1]}
    return bool(names) and all(name in kept and name not in frame.barred for name in names)


def _of_kernel(
    frame: Frame, nbytes: Sequence[float], held: Sequence[str | None], axis: int, choice: Choice
) -> float:
    """The bytes that a kernel sends: for a factor beside another, at least an exchange of the
    operands that have it; for a factor alone, a reduction of the result."""
    if choice in frame.beside:
        return 2 * _result_nbytes(frame, axis) * (2 if any(frame.grads) else 1)
    size = max(frame.sizes[axis], 2)
    return sum([
        nbytes[operand] * (2 if frame.grads[operand] else 1) / size
        for factor in cut_beside(frame, held, choice) for operand in frame.beside[factor][1]
    ])


def _candidates(
    frame: Frame, held: Sequence[str | None], kinds: Sequence[str | None],
    shards: Mapping[str, int], size: int,
) -> Iterator[tuple[Choice, list[Choice]]]:
    """Every candidate except the replicated one, with what it requires of each operand.

    A factor of which the other axes leave single elements is not sharded further.
    """
    rule = frame.rule
    for factor, places in frame.leads.items():
        length, others = rule.sizes[factor], shards.get(factor, 1)
        if factor in frame.barred or (length <= others and factor not in held) or (
            factor in rule.nonempty and length < others * size
        ):
            continue
        if factor in frame.finished and not _may_finish(frame, held, kinds, factor):
            continue
        wanted: list[Choice] = [None] * len(held)
        for operand, _, _ in places:
            wanted[operand] = factor
        for other in cut_beside(frame, held, factor) if frame.beside else ():
            for operand in frame.beside[other][1]:
                wanted[operand] = other
        bias = bias_operands(frame, factor) if factor in rule.reduce else ()
        for operand in bias:
            wanted[operand] = PassPartial(bias, "sum")
        yield factor, wanted
    for kind in dict.fromkeys(kinds):  # in order: every rank must break ties alike
        if kind is None or not _may_pass(rule, kind):
            continue
        for members in rule.linear:
            if any(kinds[member] == kind for member in members) and all(
                kinds[member] == kind or _may_become(kind, held[member]) for member in members
            ):
                passed = PassPartial(members, kind)
                yield passed, [passed if index in members else None for index in range(len(held))]


def _result_nbytes(frame: Frame, axis: int) -> float:
    """Bytes of the results on one rank, as far as other axes shard them already."""
    kept = {factors[0] for dims in frame.rule.results for factors in dims if factors}
    nbytes = float(frame.results)
    for other, size in enumerate(frame.sizes):
        if other != axis and any(name in kept for name in frame.held[other]):
            nbytes /= size
    return nbytes


def _key(
    frame: Frame, nbytes: Sequence[float], held: Sequence[str | None],
    kinds: Sequence[str | None], wanted: Sequence[Choice], size: int, candidate: Choice,
) -> tuple[float, int, bool]:
    """Bytes; then fewer operands that stop being sharded; then no partial result."""
    cost, lost = 0.0, 0
    for index, target in enumerate(wanted):
        name, kind = held[index], kinds[index]
        back = 2 if frame.grads[index] else 1
        if isinstance(target, str):
            if name == target:
                if frame.rule.windows or frame.rule.spreads:
                    cost += nbytes[index] * _halo(frame.rule, index, target) * back
                continue
            if name is not None:
                length = frame.rule.sizes[target] or 1
                ways = back * (2 if index == frame.target or _strays(frame.rule, name, target)
                               else 1)
                cost += nbytes[index] * -(-length // size) / length * ways
            elif kind is not None:
                cost += nbytes[index] * back
            else:
                cost += nbytes[index] * back if index == frame.target else 0
        elif target is None:
            if name is not None:
                lost += 1
                ways = back
                # The rank that holds least lacks most, in units of 1 - 1/g.
                length = frame.rule.sizes.get(name) or size
                lacks = nbytes[index] * (length - length // size) / length
                cost += lacks * (size / (size - 1)) * ways
            elif kind is not None:
                cost += 2 * nbytes[index] * (back if candidate is not None else 1)
        else:
            lost += name is not None
            if kind is None:
                cost += 2 * nbytes[index]
            elif kind != target.kind:
                cost += 4 * nbytes[index]
    partial = isinstance(candidate, PassPartial) or candidate in frame.rule.reduce
    return cost, lost, partial


def _strays(rule: Rule, held: str, factor: str) -> bool:
    """Whether what was sharded becomes part of a dim that another factor leads, and this one is
    no part of that dim."""
    return any(held in factors[1:] and factor not in factors
               for dims in rule.results for factors in dims)


def _halo(rule: Rule, operand: int, factor: str) -> float:
    """What a rank reads of others along a windowed dim, as a part of the whole operand."""
    window = rule.windows.get((operand, factor))
    if window is None:
        window = next((one for (_, name), one in rule.spreads.items() if name == factor), None)
    if window is None or rule.folds:
        return 0.0
    return window.overlap(rule.sizes[factor])
