"""Communication: one interface, three implementations (process groups, simulated, recording)."""

from weft.comm.bound_mesh import BoundMesh, World, check_device_type, live_meshes
from weft.comm.collective_call import PROCESS, PROVIDER, CollectiveCall
from weft.comm.communicator import Communicator, Finish, joined, parts
from weft.comm.global_state import CARRIED
from weft.comm.hybrid import hybrid_mesh, hybrid_ranks
from weft.comm.init import (
    as_bound_mesh,
    current_mesh,
    get_global_mesh,
    init_mesh,
    set_global_mesh,
    this_world,
)
from weft.comm.recording import Recorded, RecordingWorld, recorded, recording
from weft.comm.reduction import check_kind
from weft.comm.simulated import SimulatedRanks, check_takes_mesh, run_simulated
from weft.comm.source import source_line, user_frame
from weft.comm.watching import Seen, watching

__all__ = [
    "CARRIED", "PROCESS", "PROVIDER", "CollectiveCall", "BoundMesh", "Communicator", "Finish",
    "Recorded", "RecordingWorld", "Seen", "SimulatedRanks", "World", "as_bound_mesh",
    "check_device_type", "check_kind", "check_takes_mesh",
    "current_mesh", "get_global_mesh", "hybrid_mesh", "hybrid_ranks", "init_mesh", "joined",
    "live_meshes", "parts", "recorded", "recording", "run_simulated", "set_global_mesh",
    "source_line", "this_world", "user_frame", "watching",
]
