"""Users' own ops: rules and handlers for ops that weft cannot know, and a check of them."""

from weft.own.check import check_rule
from weft.own.register import (
    register_handler,
    register_rule,
    unregister_handler,
    unregister_rule,
)

__all__ = [
    "check_rule", "register_handler", "register_rule", "unregister_handler", "unregister_rule",
]
