"""What every operation means for sharded operands, as rules over factors. No torch."""

from weft.rules.notation import Call, Decision, LocalArgs, Pattern, Rule, TensorArg, parse
from weft.rules.table import lookup

__all__ = ["Call", "Decision", "LocalArgs", "Pattern", "Rule", "TensorArg", "lookup", "parse"]
