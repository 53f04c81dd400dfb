"""The meaning of every op for sharded operands, as rules over factors. No torch."""

from weft.rules.bind import bind
from weft.rules.book import Entry, Last, Page, RuleText, Text, op, page, rule
from weft.rules.call import Call, TensorArg
from weft.rules.notation import Pattern, parse
from weft.rules.own import OWN, OwnRule
from weft.rules.rule import Decision, FactorDims, LocalArgs, Rule

__all__ = [
    "OWN", "Call", "Decision", "Entry", "FactorDims", "Last", "LocalArgs", "OwnRule", "Page",
    "Pattern", "Rule", "RuleText", "TensorArg", "Text", "bind", "op", "page", "parse", "rule",
]
