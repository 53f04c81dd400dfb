"""What of torch is taken over: the one list.

Most functions of torch ask `__torch_function__` of a ShardTensor, and need nothing here. Those
below do not, or do too late: each row says why weft has to stand before them. A replacement gets
torch's own function first, then the arguments of the call; without a ShardTensor it hands them on.

`takeover` says how a function is replaced. Functions that a user registers are taken over as well
(`own.targets`), and in debug mode ShardTensor's own entry (`tensor.call.watch`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

from weft.interop import collectives, wrappers
from weft.nn import layers, loading, optimizers, parameters
from weft.tensor.call import compiled
from weft.tensor.call.random import distributions, initial
from weft.tensor.grad import hooks, torch_patches, tracers
from weft.tensor.grad import optimizers as updates
from weft.tensor.placing import seeding, subclass
from weft.tensor.takeover import replace
from weft.testing import profiling

__all__ = ["PATCHES", "Patch", "functions_of", "install"]


@dataclass(frozen=True, slots=True)
class Patch:
    """Functions of torch that one function of weft replaces.

    Args:
        home: the module or class of torch that has them. names: what they are called in it, as far
            as this torch has them; `*` stands for every class of the module.
        replacement: gets torch's own function, then the arguments of the call.
        reason: why, in a sentence.
        is_late: the home is a module that weft does not import, so it is met at its import.
    """

    home: str
    names: str
    replacement: Callable[..., Any]
    reason: str
    is_late: bool = False


_FSDP = "torch.distributed.fsdp"

PATCHES = (
    Patch("torch.autograd.Function", "apply", torch_patches.apply,
          "It would save the wrapper, which has no graph: a user's Function gets full tensors, or "
          "goes by the rule that was registered for it."),
    Patch("torch.autograd", "backward", torch_patches.backward,
          "The engine runs over local graphs; gradients of replicated leaves are reduced when it "
          "is done, also where the loss is a plain tensor."),
    Patch("torch.autograd", "grad", torch_patches.grad,
          "As backward, where all that it is given are plain tensors."),
    Patch("torch.autograd.graph", "increment_version", torch_patches.increment_version,
          "The version counter that autograd looks at is that of the local tensor."),
    Patch("torch.autograd.graph", "register_multi_grad_hook", hooks.register_hook_of_several,
          "It counts nodes of one graph task, and gradients that are reduced at the end of a "
          "backward come later."),
    Patch("torch.autograd.graph", "get_gradient_edge",
          tracers.refusing("get_gradient_edge", "torch.autograd.grad(y, x), with x itself"),
          "An edge belongs to the local graph and knows no layout: refused."),
    Patch("torch.nn.Module", "_maybe_warn_non_full_backward_hook",
          tracers.refusing("module.register_backward_hook",
                           "module.register_full_backward_hook(hook)"),
          "A module hook of the old kind (register_backward_hook) sits on a node of the local "
          "graph: refused."),
    Patch("torch.utils.checkpoint", "checkpoint.__wrapped__", torch_patches.checkpoint,
          "All ranks must recompute at the same moment, whatever each has saved."),
    Patch("torch.utils.checkpoint._CheckpointFrame", "save_inputs", torch_patches.save_inputs,
          "What is saved are local tensors, with their graph."),
    Patch("torch.utils.checkpoint._CheckpointFrame", "get_inputs", torch_patches.get_inputs,
          "What was saved becomes ShardTensors again."),
    Patch("torch.testing._comparison.TensorLikePair", "_to_tensor", torch_patches.to_tensor,
          "torch.testing.assert_close compares the global value."),
    Patch("torch", "_C._to_dlpack to_dlpack utils.dlpack.to_dlpack", torch_patches.to_dlpack,
          "It would hand out the address of a wrapper, which has no memory: refused."),
    Patch("torch.Tensor", "as_subclass", subclass.as_subclass,
          "It would make a ShardTensor without a mesh: refused."),
    Patch("torch.jit", "trace trace_module _get_trace_graph", tracers.refuse_while_tracing,
          "A trace would hold a rank's block as a constant: refused for arguments and parameters, "
          "and for ShardTensors that a traced function closes over."),
    Patch("torch.export", "export", tracers.refuse_while_tracing,
          "An exported graph knows neither layouts nor communication: refused."),
    Patch("torch.jit._recursive", "create_script_module", tracers.refusing("torch.jit.script"),
          "A scripted module would copy the wrappers of its parameters: refused."),
    Patch("torch._C", "ScriptFunction.__call__ ScriptMethod.__call__",
          tracers.refusing("a TorchScript function"),
          "TorchScript runs in C++, on the wrapper: refused."),
    Patch("torch.autograd", "gradcheck gradgradcheck",
          tracers.refusing("gradcheck",
                           "gradcheck(lambda full: program(weft.ShardTensor.from_local(full, mesh, "
                           "[weft.Replicate()])).full_tensor(), full)"),
          "They change single elements in the memory of a tensor: refused."),
    Patch("torch.nested", "as_nested_tensor", tracers.refusing("as_nested_tensor"),
          "It reads the memory of tensors in C++: refused."),
    Patch("torch", "cond", tracers.cond,
          "It would have both branches compiled; on ShardTensors the predicate is read, and one "
          "branch runs."),
    Patch("torch", "compile", compiled.compile_without_weft,
          "TorchDynamo would trace weft itself; it is told to leave weft out."),
    Patch("torch.random", "manual_seed", seeding.manual_seed, "It seeds weft's stream, too."),
    Patch("torch.random", "seed", seeding.seed, "It seeds weft's stream, too."),
    Patch("torch.random", "get_rng_state", seeding.get_rng_state,
          "The state of weft's stream is carried along, so that fork_rng and checkpoints keep it."),
    Patch("torch.random", "set_rng_state", seeding.set_rng_state,
          "It restores weft's stream, too."),
    Patch("torch.distributions", "*.rsample *.sample", distributions.sample,
          "Samplers make plain noise of a shape; it has to lie as the parameters do, and to come "
          "from weft's stream."),
    Patch("torch.nn.init", "sparse_", initial.sparse_,
          "It draws a plain permutation for each column."),
    Patch("torch.nn.init", "orthogonal_", initial.orthogonal_,
          "It transposes in place what it has drawn."),
    Patch("torch.optim", "adadelta.adadelta adagrad.adagrad adam.adam adamax.adamax asgd.asgd "
          "nadam.nadam radam.radam rmsprop.rmsprop rprop.rprop sgd.sgd", updates.on_locals,
          "These updates are elementwise, so they run on lists of local tensors, as fast as on "
          "plain ones."),
    Patch("torch.optim.Optimizer", "add_param_group", optimizers.add_param_group,
          "An optimizer that was built before its module was distributed would step parameters "
          "that nobody uses: it is remembered, and refused."),
    Patch("torch.optim.Optimizer", "_process_value_according_to_param_policy",
          optimizers.as_parameter, "State that is loaded comes to lie as its parameter."),
    Patch("torch.nn.Parameter", "data", parameters.set_data,
          "Assigning a ShardTensor to a plain parameter would end the process: refused."),
    Patch("torch.nn.Module", "load_state_dict", loading.load_state_dict,
          "With assign=True a full tensor would replace a distributed one, whole on every rank."),
    Patch("torch.nn.utils.convert_parameters", "vector_to_parameters",
          loading.vector_to_parameters,
          "A piece of the vector has not the layout of its parameter."),
    Patch("torch._C._nn", "_parse_to", loading.parse_to,
          "module.to(x) would see a meta tensor; it takes dtype and device of the ShardTensor."),
    Patch("torch.nn.SyncBatchNorm", "forward", layers.sync_batch_norm,
          "It gathers statistics over a process group, and those of batch_norm are global "
          "already."),
    Patch("torch.nn.RNNBase", "flatten_parameters", layers.flatten_parameters,
          "It puts weights into one piece of memory by their addresses."),
    Patch("torch.distributed",
          "_all_gather_base _reduce_scatter_base all_gather all_gather_coalesced "
          "all_gather_into_tensor all_gather_single all_reduce all_reduce_coalesced all_to_all "
          "all_to_all_single broadcast gather irecv isend recv reduce reduce_scatter "
          "reduce_scatter_single reduce_scatter_tensor scatter send", collectives.refuse,
          "They send a rank's own tensors, and a ShardTensor is one global value: refused."),
    Patch("torch.nn.parallel.DistributedDataParallel", "__init__",
          wrappers.refusing("DistributedDataParallel(module)", 1),
          "It would sum gradients that weft has summed: refused."),
    Patch("torch.nn.parallel.DistributedDataParallel", "forward", wrappers.refuse_inputs,
          "Around a plain module, too, it would sum gradients of the global loss again: refused."),
    Patch(f"{_FSDP}._fully_shard._fully_shard", "fully_shard",
          wrappers.refusing("fully_shard(module)", 0),
          "It would cut each rank's block again: refused.", is_late=True),
    Patch(f"{_FSDP}.fully_sharded_data_parallel", "FullyShardedDataParallel.__init__",
          wrappers.refusing("FullyShardedDataParallel(module)", 1),
          "It would cut each rank's block again: refused.", is_late=True),
    Patch("torch.autograd.profiler.profile", "_prepare_trace", profiling.prepare_trace,
          "A process has one profiler, and simulated ranks are threads of one process: refused on "
          "several."),
)


def functions_of(patch: Patch) -> Iterator[tuple[Any, str]]:
    """Owner and name of each function that is there to be replaced."""
    for name in patch.names.split():
        head, _, last = name.rpartition(".")
        if head == "*":
            held = [one for one in vars(_found(patch.home)).values() if isinstance(one, type)]
            yield from (
                (one, last) for one in dict.fromkeys(held)
                if isinstance(vars(one).get(last), FunctionType)
            )
            continue
        owner = _found(f"{patch.home}.{head}".rstrip("."))
        if owner is not None and hasattr(owner, last):
            yield owner, last


def _found(name: str) -> Any:
    """The module or class of this name, as far as it is imported; None where there is none."""
    parts, found = name.split("."), None
    for end, part in enumerate(parts, 1):
        module = sys.modules.get(".".join(parts[:end]))
        found = getattr(found, part, None) if module is None else module
    return found


def install() -> None:
    """Replace them all. Once per process."""
    for patch in PATCHES:
        if not patch.is_late or patch.home in sys.modules:
            _replace(patch)
    sys.meta_path.insert(0, _AtImport({
        patch.home: patch for patch in PATCHES if patch.is_late and patch.home not in sys.modules
    }))


def _replace(patch: Patch) -> None:
    for owner, name in functions_of(patch):
        replace(owner, name, patch.replacement)


class _AtImport(MetaPathFinder):
    """Finds what Python would find anyway, and has it replaced once it is there."""

    def __init__(self, late: dict[str, Patch]) -> None:
        self.late = late

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        patch = self.late.get(fullname)
        spec = None if patch is None else PathFinder.find_spec(fullname, path, target)
        if patch is None or spec is None or spec.loader is None:
            return None
        loader, run = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _replace(patch)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
