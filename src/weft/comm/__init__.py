"""Communication: one interface, three bodies (process groups, simulated, recording)."""

from weft.comm.bound_mesh import BoundMesh, World, current_mesh
from weft.comm.communicator import Communicator
from weft.comm.reduction import check_kind
from weft.comm.simulated import run_simulated

__all__ = [
    "BoundMesh", "Communicator", "World", "check_kind", "current_mesh", "run_simulated",
]
