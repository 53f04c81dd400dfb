"""The meaning of every op for sharded operands, as rules over factors. No torch."""

from weft.rules.bind import bind
from weft.rules.book import Entry, Page, RuleText, Text, op, page, rule
from weft.rules.call import Call, TensorArg
from weft.rules.notation import Pattern, parse
from weft.rules.own import OWN, OwnRule
from weft.rules.rule import Decision, FactorDims, Length, LocalArgs, Rule
from weft.rules.window import (
    AnyWindow,
    Boxed,
    BoxedDim,
    Idle,
    OnBox,
    OnRank,
    Shift,
    Table,
    Tables,
    Window,
    is_ring,
)

__all__ = [
    "OWN", "AnyWindow", "Boxed", "BoxedDim", "Call", "Decision", "Entry", "FactorDims", "Idle",
    "Length", "LocalArgs", "OnBox", "OnRank", "OwnRule", "Page", "Pattern", "Rule",
    "RuleText", "Shift", "Table", "Tables", "TensorArg", "Text", "Window", "bind", "is_ring", "op",
    "page", "parse", "rule",
]
