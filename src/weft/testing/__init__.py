"""Simulated ranks in this process, for tests and notebooks; a check of rules; a meter of memory."""

from weft.comm import run_simulated as run
from weft.own import check_rule
from weft.testing.memory import peak_memory
from weft.testing.notebook import load_ipython_extension
from weft.testing.session import PerRank, Session, session

__all__ = [
    "PerRank", "Session", "check_rule", "load_ipython_extension", "peak_memory", "run", "session",
]
