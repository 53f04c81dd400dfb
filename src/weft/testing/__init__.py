"""n ranks in this process, for tests and notebooks; the check of a rule; a meter of memory."""

from weft.comm import run_simulated as run
from weft.own import check_rule
from weft.testing.memory import peak_memory

__all__ = ["check_rule", "peak_memory", "run"]
