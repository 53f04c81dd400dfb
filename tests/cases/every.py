"""All families of cases in one list."""

from tests.cases import (
    Case,
    attention,
    contraction,
    index,
    inplace,
    loss,
    norm,
    pointwise,
    reduction,
    view,
)

EVERY: list[Case] = [
    one
    for family in (
        pointwise, reduction, contraction, view, index, norm, loss, attention, inplace,
    )
    for one in family.CASES
]
