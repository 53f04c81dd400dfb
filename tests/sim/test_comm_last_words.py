"""What a rank would say if a backend ended its process now."""

from __future__ import annotations

import subprocess
import sys
from types import FunctionType
from typing import Any

import weft
from weft import P
from weft.comm.last_words import words
from weft.comm.simulated import SimulatedCommunicator


def test_it_names_the_collective_the_call_and_the_line(monkeypatch: Any) -> None:
    said, meet = [], SimulatedCommunicator._meet

    def watched(self: Any, op: str, *args: Any) -> Any:
        said.append(words())
        return meet(self, op, *args)

    ours = {**globals(), "__name__": "weft.comm.watched"}  # no frame of the user's
    monkeypatch.setattr(
        SimulatedCommunicator, "_meet",
        FunctionType(watched.__code__, ours, "_meet", None, watched.__closure__),
    )

    def fn(mesh: Any) -> None:
        weft.ones(4, mesh=mesh, spec=P("dp")).sum().item()

    weft.testing.run(fn, mesh={"dp": 2})
    line = f"{__file__}:{fn.__code__.co_firstlineno + 1}"
    assert said[0].splitlines()[0] == (
        "all_reduce over axes (dp), ranks 0, 1: the backend ends the process, as it does when "
        f"ranks disagree: it was at item, at {line}."
    )


def test_elsewhere_it_names_the_line() -> None:
    assert f"it was at {__file__}:" in words()


SCRIPT = """
import ctypes
from weft.comm.last_words import prepare
prepare(3)
prepare(4)
ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
"""


def test_the_hook_before_it_has_the_last_word() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == -6
    assert done.stderr.startswith(
        "rank 3: a process with collectives: the backend ends the process, as it does when ranks "
        "disagree: it was at <string>:6.\n"
    )
    assert done.stderr.rstrip().endswith("terminate called without an active exception")


def test_it_is_taken_back_before_the_interpreter_ends() -> None:
    program = ("import atexit, ctypes; from weft.comm.last_words import prepare\n"
               "atexit.register(ctypes.CDLL('libstdc++.so.6')._ZSt9terminatev); prepare(0)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == -6 and "rank 0" not in done.stderr
