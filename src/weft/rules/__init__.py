"""The meaning of every op for sharded operands, as rules over factors. No torch."""

from weft.rules.bind import bind
from weft.rules.book import Entry, Last, Page, RuleText, Text, op, page, rule
from weft.rules.call import Call, TensorArg
from weft.rules.notation import Pattern, parse
from weft.rules.own import OWN, OwnRule
from weft.rules.rule import Decision, FactorDims, LocalArgs, Rule
from weft.rules.window import Boxed, BoxedDim, OnBox, Table, Tables, Window

__all__ = [
    "OWN", "Boxed", "BoxedDim", "Call", "Decision", "Entry", "FactorDims", "Last", "LocalArgs",
    "OnBox", "OwnRule", "Page", "Pattern", "Rule", "RuleText", "Table", "Tables", "TensorArg",
    "Text", "Window", "bind", "op", "page", "parse", "rule",
]
