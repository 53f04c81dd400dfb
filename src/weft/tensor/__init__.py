"""The ShardTensor: the subclass, capture, recipes, dispatch, construction."""

from weft.tensor import special
from weft.tensor.call import compiled, dispatch, watch
from weft.tensor.call.cache import cache_clear, cache_info
from weft.tensor.call.random import distributions as sampling
from weft.tensor.call.random import initial
from weft.tensor.grad import autograd, bridge, optimizers
from weft.tensor.modes import debug, explain, strict
from weft.tensor.placing import construct, direct, in_place, redistribute, saved, seeding, values
from weft.tensor.placing.construct import arange, empty, full, ones, zeros
from weft.tensor.placing.draw import rand, randint, randn, randperm
from weft.tensor.placing.enter import data_of, enter_all
from weft.tensor.placing.from_local import from_local
from weft.tensor.placing.scatter import distribute_tensor, scatter_tensor
from weft.tensor.shard_tensor import ShardTensor, hooks

__all__ = [
    "ShardTensor", "arange", "cache_clear", "cache_info", "debug", "distribute_tensor", "empty",
    "explain", "full", "ones", "rand", "randint", "randn", "randperm", "scatter_tensor", "strict",
    "zeros",
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
seeding.install()
in_place.install()
direct.install()
initial.install()
sampling.install()
watch.install()
