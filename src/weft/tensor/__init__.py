"""The ShardTensor: the subclass, capture, recipes, dispatch, construction."""

from weft import ops
from weft.comm import CARRIED
from weft.rng import STREAM
from weft.tensor import attributes, families, keys, operators
from weft.tensor.call import build, dispatch, func_transforms, watch
from weft.tensor.call.cache import cache_clear, cache_info
from weft.tensor.grad import autograd
from weft.tensor.members import hooks
from weft.tensor.modes import debug, explain, strict
from weft.tensor.placing import boxed, construct, in_place, redistribute, saved, subclass, values
from weft.tensor.placing.callback import from_callback, to_callback
from weft.tensor.placing.construct import arange, empty, full, ones, zeros
from weft.tensor.placing.draw import rand, randint, randn, randperm
from weft.tensor.placing.factories import sharded_factories
from weft.tensor.placing.freed import hold
from weft.tensor.placing.from_local import from_local
from weft.tensor.placing.left_whole import warn_if_whole
from weft.tensor.placing.operands import data_of, move_operands
from weft.tensor.placing.scatter import distribute_tensor, scatter_tensor
from weft.tensor.shard_tensor import ShardTensor

__all__ = [
    "ShardTensor", "arange", "cache_clear", "cache_info", "debug", "distribute_tensor", "empty",
    "explain", "from_callback", "full", "ones", "rand", "randint", "randn", "randperm",
    "scatter_tensor", "sharded_factories", "strict", "to_callback", "warn_if_whole", "zeros",
]

hooks.add = keys.add
hooks.call = dispatch.call
hooks.learn = dispatch.learn
hooks.beneath = func_transforms.beneath
hooks.failed = dispatch.failed
hooks.move_operands = move_operands
hooks.construct = construct
hooks.redistribute = redistribute
hooks.data_of = data_of
hooks.hold = hold
hooks.from_local = from_local
hooks.autograd = autograd
hooks.values = values
hooks.saved = saved
hooks.seen = boxed.seen
hooks.layout_of_view = build.layout_of_view
ops.join(*families.PAGES)
dispatch.SPECIAL.update(attributes.TABLE)
CARRIED.append(STREAM)
ShardTensor.__new__ = staticmethod(subclass.new)  # type: ignore[method-assign]
operators.install()
in_place.install()
watch.install()
