"""What every operation means for sharded operands, as rules over factors. No torch."""

from weft.rules.notation import Call, Decision, LocalArgs, Pattern, Rule, TensorArg, parse
from weft.rules.own import OWN, OwnRule
from weft.rules.table import covers, lookup, numbers_flow

__all__ = [
    "OWN", "Call", "Decision", "LocalArgs", "OwnRule", "Pattern", "Rule", "TensorArg", "covers",
    "lookup", "numbers_flow", "parse",
]
