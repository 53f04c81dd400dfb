"""Buffers lent to a backend: the end of the process waits for them, and for no others."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.comm import init_mesh
from weft.comm.pending_buffers import _lent, lend, settle


def test_settle_waits_for_what_is_lent_but_not_for_ever() -> None:
    held = [lend(torch.ones(3))]
    start = time.monotonic()
    settle(0.05)
    assert 0.05 <= time.monotonic() - start < 5
    release = threading.Timer(0.05, held.clear)
    release.start()
    settle(60)
    assert not held and not _lent
    assert time.monotonic() - start < 30
    release.join()


def test_an_error_keeps_nothing_lent() -> None:
    def fails(x: torch.Tensor) -> None:
        assert len(_lent) == 1
        raise KeyboardInterrupt

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        comm = init_mesh({"x": 2}).comm((0,))
        with pytest.raises(KeyboardInterrupt) as kept:
            comm._start("broadcast", fails, torch.ones(3))  # type: ignore[attr-defined]
        assert kept.tb is not None and not _lent
    finally:
        dist.destroy_process_group()
