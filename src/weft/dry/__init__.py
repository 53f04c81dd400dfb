"""What a program costs on any number of devices, without them."""

from weft.dry.report import DryRun
from weft.dry.run import dry_run

__all__ = ["DryRun", "dry_run"]
