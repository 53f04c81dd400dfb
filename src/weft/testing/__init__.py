"""n ranks in this process, for tests and notebooks."""

from weft.comm import run_simulated as run

__all__ = ["run"]
