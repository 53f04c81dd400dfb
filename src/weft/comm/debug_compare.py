"""Ranks of process groups compare where they are, through the store of torch.distributed.

The store is a small server beside the process groups. It works on every backend, needs no device,
and is still there when a group has failed. Two things go through it.

*Roll calls*, in debug mode, one before each collective. Each rank writes, in words, where it is
(one key per rank, read only when something is wrong) and the digest of its request. The first
of the group's ranks reads the digests and writes the verdict, for which all wait: the same, or
not. If not, all ranks write their requests and read those of the others. A rank that has
waited for the timeout, or sees that a missing rank has ended, writes a verdict that names
the missing ranks. A verdict is written only once, so all ranks raise one error, also those that
come late. What has been read is deleted. Each rank deletes its own digest once it knows the
outcome, and a rank that ends waits a second for that, because its process may have the store.

*Last words*: a rank whose collective has failed writes where that was, and reads for a second
what the others write about this group, or have last written about any group. A rank whose
backward has failed also writes, without reading. This costs nothing until something fails.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from weft.comm.collective_call import (
    FIX,
    RULE,
    CollectiveCall,
    agree,
    digest,
    disagreement,
    lines,
    who,
)
from weft.errors import message

__all__ = ["DebugCompare"]

_SAME, _OTHER = "same", "other"
"""Verdicts. Any other verdict is the text of an error."""

_LONGEST_PAUSE = 0.02
_LOOK_FOR_ENDED = 0.5
_GRACE = 1.0
"""Seconds: between two looks into the store, between two looks for ended ranks, for last words."""


class DebugCompare:
    """One rank's part in all roll calls of its world."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._counts: dict[str, int] = {}  # roll calls, per group
        self._failures: dict[str, int] = {}
        self._others: dict[str, list[str]] = {}  # digests of the last, per group

    def call(self, ask: CollectiveCall, patience: float) -> str:
        """Wait, at most `patience` seconds, until all of `ask.ranks` have come and are compared.

        Returns the error to raise, the same on all ranks; "" if they agree.
        """
        store = _store()
        if store is None:
            return ""
        count = self._count(self._counts, ask.ranks)
        turn = _Turn(store, self.rank, ask, count, patience)
        self._others[turn.group] = [turn.digest(one) for one in turn.members if one != self.rank]
        try:
            return turn.run()
        except RuntimeError as error:
            return _no_store(ask, self.rank, error)

    def end(self, is_on: bool) -> None:
        """Tell ranks in a roll call that this one will not come any more, in debug mode (`is_on`)
        also if it has come to none: that of an `if rank == 0` may be the first."""
        store = _store() if self._counts or is_on else None
        if store is not None:
            with suppress(RuntimeError):  # the process with the store has already ended
                store.set(f"ended/{self.rank}", "")
                deadline = time.monotonic() + _GRACE
                for digest_of_other in itertools.chain(*self._others.values()):
                    while store.check([digest_of_other]) and time.monotonic() < deadline:
                        time.sleep(_LONGEST_PAUSE)

    def stopped(self, why: str) -> None:
        """Write last words in advance: this rank has failed and may not come again."""
        store = _store()
        if store is not None:
            with suppress(RuntimeError):  # the process with the store has already ended
                store.set(f"stopped/{self.rank}", why)

    def last_words(self, ranks: Sequence[int], mine: str) -> list[str]:
        """After a collective over `ranks` has failed: what its ranks are known to be doing.

        Best effort, within a second: others may wait longer than this one.
        """
        words: dict[int, str] = {self.rank: mine}
        count = self._count(self._failures, ranks)
        # In a thread, because a store whose process is stopped does not answer at all.
        reader = threading.Thread(
            target=_read_words, args=(words, self.rank, tuple(ranks), count), daemon=True
        )
        reader.start()
        reader.join(2 * _GRACE)
        unknown = "was not heard of: it did not come here, ended, or waits elsewhere"
        return who([(rank, dict(words).get(rank, unknown)) for rank in sorted(ranks)])

    def _count(self, counts: dict[str, int], ranks: Sequence[int]) -> int:
        key = _group(ranks)
        counts[key] = counts.get(key, 0) + 1
        return counts[key]


class _Turn:
    """One roll call, seen from one rank."""

    def __init__(
        self, store: Any, rank: int, ask: CollectiveCall, count: int, patience: float
    ) -> None:
        self.store, self.rank, self.ask, self.patience = store, rank, ask, patience
        self.members = sorted(ask.ranks)
        self.count, self.group = count, _group(ask.ranks)
        self.place = f"{self.group}/{count}"
        self.verdict = f"{self.place}/verdict"

    def run(self) -> str:
        """The error to raise, or ""."""
        store, rank = self.store, self.rank
        store.set(f"at/{rank}", f"{self.ask}{self.ask.reason} (number {self.count} of these ranks)")
        store.set(self.digest(rank), pickle.dumps(digest(self.ask, rank)))
        said = self._wait()
        if said == _OTHER:
            said = self._compare()
        store.delete_key(self.digest(rank))
        return "" if said == _SAME else said

    def digest(self, rank: int) -> str:
        """The key of a rank's digest, which exists while the rank waits for the outcome."""
        return f"{self.place}/{rank}"

    def _wait(self) -> str:
        """The verdict, given by the first of the ranks, or by one that has waited too long."""
        start = time.monotonic()
        pause, looked = 1e-4, start
        digests = [self.digest(rank) for rank in self.members]
        while not self.store.check([self.verdict]):
            if self.rank == self.members[0] and self.store.check(digests):
                same = agree(map(pickle.loads, self.store.multi_get(digests)))
                return self._give(_SAME if same else _OTHER)
            now = time.monotonic()
            if now - looked > _LOOK_FOR_ENDED:
                looked = now
                if any(self.store.check([f"ended/{rank}"]) for rank in self._missing()):
                    return self._give(self._late(now - start))
            if now - start > self.patience:
                return self._give(self._late(self.patience))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return self.store.get(self.verdict).decode()

    def _give(self, verdict: str) -> str:
        """Write the verdict, unless another rank was faster; returns the valid one."""
        if self.count > 1 and verdict in (_SAME, _OTHER):  # all have read the previous one
            self.store.delete_key(f"{self.group}/{self.count - 1}/verdict")
        return self.store.compare_set(self.verdict, "", verdict).decode()

    def _compare(self) -> str:
        """The full requests of all ranks."""
        self.store.set(f"{self.place}/ask/{self.rank}", pickle.dumps(self.ask))
        keys = [f"{self.place}/ask/{rank}" for rank in self.members]
        deadline = time.monotonic() + self.patience
        while not self.store.check(keys):
            if time.monotonic() > deadline:  # one has died since
                return self._late(self.patience)
            time.sleep(_LONGEST_PAUSE)
        asks = [pickle.loads(one) for one in self.store.multi_get(keys)]
        return disagreement(asks, self.members)

    def _missing(self) -> list[int]:
        return [rank for rank in self.members if not self.store.check([self.digest(rank)])]

    def _late(self, waited: float) -> str:
        missing = self._missing()
        whose = [
            (rank, f"waits at {self._at(rank)}") for rank in self.members if rank not in missing
        ]
        for rank in missing:
            last = self._at(rank)
            has_ended = self.store.check([f"ended/{rank}"])
            nothing = "it asked for nothing in debug mode"
            if not has_ended:
                nothing += ", which all ranks enter together"
            whose.append((rank, f"{'has ended' if has_ended else 'did not come'}; " + (
                f"the last it asked for is {last}" if last else nothing)))
        return message(
            f"{self.ask.collective} over axes ({self.ask.over})",
            f"{len(self.members) - len(missing)} of {len(self.members)} ranks came within "
            f"{waited:.3g} s", f"{RULE}, each within the timeout ({self.patience:g} s)",
            lines(who(whose)), f"{FIX}; if ranks merely need longer, WEFT_TIMEOUT=600",
        )

    def _at(self, rank: int) -> str:
        """Where a rank is, or was last, in words; "" if it has never written it."""
        key = f"at/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else ""


def _store() -> Any:
    """The default group's store; None if there is none, or if it has no content.

    It is looked up each time, because a cached one would outlive its process group.
    """
    if not dist.is_initialized() or dist.get_backend() in ("fake", "mpi"):
        return None
    return dist.PrefixStore("weft", distributed_c10d._get_default_store())


def _group(ranks: Sequence[int]) -> str:
    """A short key for a set of ranks, whatever their order."""
    text = ",".join(map(str, sorted(ranks)))
    return text if len(text) <= 40 else hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _read_words(words: dict[int, str], rank: int, ranks: tuple[int, ...], count: int) -> None:
    place = f"stopped/{_group(ranks)}/{count}"
    with suppress(RuntimeError):  # the process with the store has already ended
        store = _store()
        if store is None:
            return
        for key in (f"{place}/{rank}", f"stopped/{rank}"):
            store.set(key, words[rank])
        deadline = time.monotonic() + _GRACE
        missing = [other for other in ranks if other != rank]
        while missing and time.monotonic() < deadline:
            for other in [one for one in missing if store.check([f"{place}/{one}"])]:
                words[other] = store.get(f"{place}/{other}").decode()
                missing.remove(other)
            time.sleep(_LONGEST_PAUSE)
        for other in missing:
            if store.check([f"stopped/{other}"]):  # in another group, or earlier in this one
                words[other] = store.get(f"stopped/{other}").decode()
            elif store.check([f"at/{other}"]):
                last = store.get(f"at/{other}").decode()
                words[other] = f"has not been heard of; the last it asked for is {last}"


def _no_store(ask: CollectiveCall, rank: int, error: RuntimeError) -> str:
    reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else "no reason"
    return message(
        f"{ask.collective} over axes ({ask.over})",
        f"rank {rank} cannot reach the store of torch.distributed: {reason}",
        "debug mode compares what ranks ask for through that store, which lives in the process "
        "that hosts it (rank 0, or the launcher)",
        lines([f"rank {rank} waits at {ask}{ask.reason}"]),
        "see the first error that any rank printed; the host lives until all ranks are done",
    )
