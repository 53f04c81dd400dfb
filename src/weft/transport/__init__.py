"""Plans carried out on local tensors, differentiable, and the log of what moves."""

from weft.transport import traffic
from weft.transport.joint import move_together, run_together, start_together
from weft.transport.network import measure_links
from weft.transport.shards import Shards, collective
from weft.transport.trace import trace
from weft.transport.transition import Transition

__all__ = [
    "Shards", "Transition", "collective", "measure_links", "move_together", "run_together",
    "start_together", "trace", "traffic",
]
