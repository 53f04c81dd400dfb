"""What every operation means for sharded operands, as rules over factors. No torch."""

from weft.rules.notation import Call, Decision, LocalArgs, Pattern, Rule, TensorArg, parse
from weft.rules.table import lookup, numbers_flow

__all__ = [
    "Call", "Decision", "LocalArgs", "Pattern", "Rule", "TensorArg", "lookup", "numbers_flow",
    "parse",
]
