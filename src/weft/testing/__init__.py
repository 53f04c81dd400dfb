"""n ranks in this process, for tests and notebooks; the check of a rule."""

from weft.comm import run_simulated as run
from weft.own import check_rule

__all__ = ["check_rule", "run"]
