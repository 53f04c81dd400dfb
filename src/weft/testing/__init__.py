"""Simulated ranks in this process, for tests and notebooks; a check of rules; a meter of memory."""

from weft.comm import run_simulated as run
from weft.own import check_rule
from weft.testing.memory import peak_memory
from weft.testing.session import PerRank, Session, load_ipython_extension, session

__all__ = [
    "PerRank", "Session", "check_rule", "load_ipython_extension", "peak_memory", "run", "session",
]
