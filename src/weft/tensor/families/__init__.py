"""Pages of the book whose compositions need the ShardTensor itself: `PAGES`."""

from weft.tensor.families import (
    bags,
    counting,
    grouped,
    indexing,
    least_squares,
    likes,
    masks,
    reshapes,
    strided,
)
from weft.tensor.families.draws import dropout, fills, initial, samplers

__all__ = ["PAGES"]

PAGES = tuple([one.PAGE for one in (
    bags, counting, dropout, fills, grouped, indexing, initial, least_squares, likes, masks,
    reshapes, samplers, strided,
)])
