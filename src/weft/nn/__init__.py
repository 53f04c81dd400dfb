"""Modules on a mesh."""

from weft.nn import optimizers
from weft.nn.distribute import distribute_module
from weft.nn.groups import Gather
from weft.nn.libraries import ShardedCollator, as_one_process
from weft.nn.materialize import materialize
from weft.nn.pins import PrepareModuleInput, PrepareModuleOutput
from weft.nn.report import Report, report
from weft.nn.styles import ColwiseParallel, RowwiseParallel, SequenceParallel, VocabParallel

__all__ = [
    "ColwiseParallel", "Gather", "PrepareModuleInput", "PrepareModuleOutput", "Report",
    "RowwiseParallel", "SequenceParallel", "ShardedCollator", "VocabParallel", "as_one_process",
    "distribute_module", "materialize", "report",
]

optimizers.install()
