"""What a program costs on any number of devices, without them."""

from weft.dry.compute import Compute, measure_compute
from weft.dry.report import DryRun
from weft.dry.run import dry_classes, dry_run

__all__ = ["Compute", "DryRun", "dry_classes", "dry_run", "measure_compute"]
