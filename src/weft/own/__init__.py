"""Users' own ops: rules and handlers for ops that weft cannot know, and a check of them."""

from weft.own.check import check_rule
from weft.own.register import (
    op_by_op,
    register_handler,
    register_rule,
    unregister_handler,
    unregister_rule,
)

__all__ = [
    "check_rule", "op_by_op", "register_handler", "register_rule", "unregister_handler",
    "unregister_rule",
]
