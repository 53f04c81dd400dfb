"""From one layout to another: steps, plans, and what they cost. Standard library only."""

from weft.planner.check import IDEMPOTENT, LINEAR, check
from weft.planner.cost import Link, is_local, step_nbytes, step_nbytes_at, step_seconds
from weft.planner.interpret import PlanError, interpret
from weft.planner.plan import Plan, gradient_layout, naive, plan, transpose
from weft.planner.steps import (
    AllGather,
    AllReduce,
    Exchange,
    ReduceScatter,
    Slice,
    Step,
    Term,
    Transfer,
)

__all__ = [
    "AllGather", "AllReduce", "Exchange", "IDEMPOTENT", "LINEAR", "Link", "Plan", "PlanError",
    "ReduceScatter", "Slice", "Step", "Term", "Transfer", "check", "gradient_layout", "interpret",
    "is_local", "naive", "plan", "step_nbytes", "step_nbytes_at", "step_seconds", "transpose",
]
