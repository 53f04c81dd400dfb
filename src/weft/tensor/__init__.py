"""The ShardTensor: the subclass, capture, recipes, dispatch, construction."""

from weft.tensor import (
    autograd,
    bridge,
    compiled,
    construct,
    dispatch,
    optimizers,
    redistribute,
    saved,
    special,
    values,
)
from weft.tensor.cache import cache_clear, cache_info
from weft.tensor.construct import arange, empty, full, ones, zeros
from weft.tensor.enter import data_of, enter_all
from weft.tensor.from_local import from_local
from weft.tensor.modes import debug, explain, strict
from weft.tensor.scatter import distribute_tensor, scatter_tensor
from weft.tensor.shard_tensor import ShardTensor, hooks

__all__ = [
    "ShardTensor", "arange", "cache_clear", "cache_info", "debug", "distribute_tensor", "empty",
    "explain", "full", "ones", "scatter_tensor", "strict", "zeros",
]

hooks.call = dispatch.call
hooks.learn = dispatch.learn
hooks.enter_all = enter_all
hooks.construct = construct
hooks.redistribute = redistribute
hooks.data_of = data_of
hooks.from_local = from_local
hooks.autograd = autograd
hooks.values = values
hooks.saved = saved
dispatch.SPECIAL.update(special.TABLE)
bridge.install()
compiled.install()
optimizers.install()
