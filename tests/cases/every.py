"""All families of cases in one list."""

from tests.cases import (
    Case,
    attention,
    batched,
    contraction,
    index,
    inplace,
    loss,
    neighbours,
    norm,
    order,
    pairs,
    picks,
    places,
    pointwise,
    program,
    reduction,
    scan,
    tall,
    transforms,
    view,
    views,
    windows,
    writes,
)

EVERY: list[Case] = [
    one
    for family in (
        pointwise, reduction, contraction, view, index, norm, loss, attention, inplace, program,
        views, writes, scan, order, picks, batched, places, windows, pairs,
        tall, transforms, neighbours,
    )
    for one in family.CASES
]
