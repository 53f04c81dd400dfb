"""From one layout to another: steps, plans and their cost. Standard library only."""

from weft.planner.check import IDEMPOTENT, LINEAR, check, kept_partials
from weft.planner.cost import is_local, step_nbytes, step_nbytes_at, step_seconds
from weft.planner.links import GLOO, NCCL, Link, Links, set_links
from weft.planner.plan import (
    Plan,
    fetching,
    folding,
    forget_plans,
    gradient_layout,
    kept_plans,
    plan,
    planned,
)
from weft.planner.steps import (
    AllGather,
    AllReduce,
    Exchange,
    Fetch,
    Fold,
    MakePartial,
    ReduceScatter,
    Slice,
    Step,
    Transfer,
)

__all__ = [
    "AllGather", "AllReduce", "Exchange", "Fetch", "Fold", "GLOO", "IDEMPOTENT", "LINEAR", "Link",
    "Links", "NCCL", "Plan", "ReduceScatter", "Slice", "Step", "MakePartial", "Transfer", "check",
    "fetching", "folding", "forget_plans", "gradient_layout", "is_local", "kept_plans",
    "kept_partials", "plan", "planned", "set_links", "step_nbytes", "step_nbytes_at",
    "step_seconds",
]
