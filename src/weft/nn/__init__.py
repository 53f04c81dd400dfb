"""Modules on a mesh."""

from weft.core.counterparts import names_elsewhere
from weft.nn import flex_attention, optimizers
from weft.nn.distribute import distribute_module
from weft.nn.experts import by_expert
from weft.nn.groups import Gather, accumulate
from weft.nn.libraries import ShardedCollator, as_one_process
from weft.nn.materialize import materialize
from weft.nn.owners import Owners, at_owners
from weft.nn.pins import PrepareModuleInput, PrepareModuleOutput
from weft.nn.recurrences import linear_scan
from weft.nn.report import Report, report
from weft.nn.reshard import reshard
from weft.nn.styles import ColwiseParallel, RowwiseParallel, SequenceParallel, VocabParallel
from weft.nn.token_order import TokenOrder, zigzag

__all__ = [
    "ColwiseParallel", "Gather", "Owners", "PrepareModuleInput", "PrepareModuleOutput", "Report",
    "RowwiseParallel", "SequenceParallel", "ShardedCollator", "TokenOrder", "VocabParallel",
    "accumulate", "as_one_process", "at_owners", "by_expert", "distribute_module", "linear_scan",
    "materialize", "report", "reshard", "zigzag",
]

__getattr__ = names_elsewhere("weft.nn")

flex_attention.install()
optimizers.install()
