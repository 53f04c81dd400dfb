"""Every ShardTensor of these tests says the truth about its order in memory."""

from tests import memory_order

memory_order.watch()
