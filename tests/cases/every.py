"""All families of cases in one list."""

from tests.cases import (
    Case,
    attention,
    contraction,
    index,
    inplace,
    loss,
    norm,
    order,
    picks,
    pointwise,
    program,
    reduction,
    scan,
    view,
    views,
    writes,
)

EVERY: list[Case] = [
    one
    for family in (
        pointwise, reduction, contraction, view, index, norm, loss, attention, inplace, program,
        views, writes, scan, order, picks,
    )
    for one in family.CASES
]
