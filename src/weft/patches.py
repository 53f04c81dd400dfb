"""The one list of torch functions that weft replaces.

Most functions of torch ask a ShardTensor's `__torch_function__` and need nothing here. The
functions below do not ask, or ask too late; each row says why weft must intercept them. A
replacement gets torch's own function first, then the arguments of the call. Without a ShardTensor
it passes them on.

`takeover` replaces a function. Functions that a user registers are replaced as well
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

from weft.interop import checkpoint, replicas, safetensors, wrappers, zero_bubble
from weft.nn import modules, optimizers, scans
from weft.nn.groups import hooks as of_groups
from weft.tensor.call import compiled, dropped_arguments, func_transforms
from weft.tensor.families.draws import distributions, initial
from weft.tensor.grad import clipping, hooks, muon, torch_patches, tracers
from weft.tensor.grad import optimizers as updates
from weft.tensor.placing import freed, seeding, subclass
from weft.tensor.takeover import replace
from weft.testing import profiling

__all__ = ["PATCHES", "Patch", "functions_of", "install"]


@dataclass(frozen=True, slots=True)
class Patch:
    """Functions of torch that one function of weft replaces.

    Args:
        home: the module or class of torch that has them. If the program has yet to import it, they
            are replaced when it does.
        names: their names in it, separated by spaces; names that this torch lacks are skipped, and
            `*` stands for every class of the module.
        replacement: gets torch's own function, then the arguments of the call.
        reason: why, in a sentence.
    """

    home: str
    names: str
    replacement: Callable[..., Any]
    reason: str


_FSDP = "torch.distributed.fsdp"
_AS_DTENSOR = "x.to_dtensor(), which copies nothing; x.redistribute(...) for another layout"

PATCHES = (
    Patch("torch.autograd.Function", "apply", torch_patches.apply,
          "It would save the wrapper, which has no graph. A user's Function follows the rule that "
          "was registered for it, runs op by op if it consists of torch's operations, or gets full "
          "tensors."),
    Patch("torch.autograd", "backward", torch_patches.backward,
          "The engine runs over local graphs; gradients of replicated leaves are reduced when it "
          "is done, also where the loss is a plain tensor."),
    Patch("torch.autograd", "grad", torch_patches.grad,
          "As backward, where all of its arguments are plain tensors."),
    Patch("torch.autograd.graph", "increment_version", torch_patches.increment_version,
          "Autograd checks the version counter of the local tensor."),
    Patch("torch.autograd.graph", "register_multi_grad_hook", hooks.register_hook_of_several,
          "It counts nodes of one graph task, but gradients that are reduced at the end of a "
          "backward arrive later."),
    Patch("torch.autograd.graph", "get_gradient_edge",
          tracers.refusing("get_gradient_edge", "torch.autograd.grad(y, x), with x itself"),
          "An edge belongs to the local graph and knows no layout: refused."),
    Patch("torch.nn.Module", "_maybe_warn_non_full_backward_hook",
          tracers.refusing("module.register_backward_hook",
                           "module.register_full_backward_hook(hook)"),
          "A module hook of the old kind (register_backward_hook) sits on a node of the local "
          "graph: refused."),
    Patch("torch.utils.checkpoint", "checkpoint.__wrapped__", of_groups.checkpoint,
          "All ranks must recompute at the same moment, whatever each of them has saved."),
    Patch("torch.testing._comparison.TensorLikePair", "_to_tensor", torch_patches.to_tensor,
          "torch.testing.assert_close compares the global value."),
    Patch("torch._tensor_str", "_str", freed.text,
          "It reads the memory of a plain tensor, which ends the process where that has been freed "
          "by a group of parameters: a traceback may show one."),
    Patch("torch", "_C._to_dlpack to_dlpack utils.dlpack.to_dlpack", torch_patches.to_dlpack,
          "It would expose the address of a wrapper, which has no memory: refused."),
    Patch("torch.Tensor", "as_subclass", subclass.as_subclass,
          "It would make a ShardTensor without a mesh, or another class of one: refused."),
    Patch("torch.jit", "trace trace_module _get_trace_graph", tracers.refuse_while_tracing,
          "A trace would contain a rank's block as a constant: refused for arguments, parameters, "
          "and ShardTensors that a traced function closes over."),
    Patch("torch.export", "export", tracers.refuse_while_tracing,
          "An exported graph knows neither layouts nor communication: refused."),
    Patch("torch.jit._recursive", "create_script_module", tracers.refusing("torch.jit.script"),
          "A scripted module would copy the wrappers of its parameters: refused."),
    Patch("torch._C", "ScriptFunction.__call__ ScriptMethod.__call__", tracers.scripted,
          "TorchScript runs in C++, on the wrapper. The Python function that was scripted is "
          "called; traced and loaded functions, and methods, are refused."),
    Patch("torch.autograd", "gradcheck gradgradcheck",
          tracers.refusing("gradcheck",
                           "gradcheck(lambda full: program(weft.ShardTensor.from_local(full, mesh, "
                           "[weft.Replicate()])).full_tensor(), full)"),
          "They change single elements in the memory of a tensor: refused."),
    Patch("torch.nested", "as_nested_tensor", tracers.refusing("as_nested_tensor"),
          "It reads the memory of tensors in C++: refused."),
    Patch("torch", "cond", tracers.cond,
          "It would compile both branches. With ShardTensors the predicate is read, and one "
          "branch runs."),
    Patch("torch._functorch.vmap", "vmap_impl", func_transforms.vmap,
          "Ops of its batching rules that reach a ShardTensor below autograd are calls on it."),
    Patch("torch._functorch.eager_transforms", "grad_and_value_impl",
          func_transforms.differentiated,
          "As vmap; and calls on ShardTensors that the function closes over are wrapped in "
          "nothing."),
    Patch("torch._functorch.eager_transforms", "_vjp_with_argnums", func_transforms.vjp,
          "As grad; its second result runs after the transform has ended."),
    Patch("torch._functorch.eager_transforms", "_jvp_with_argnums", func_transforms.jvp,
          "Forward AD has one state for all simulated ranks: with ShardTensors it is the "
          "transpose of the transpose."),
    Patch("torch._higher_order_ops.associative_scan", "associative_scan", scans.associative_scan,
          "Its slices along a sharded dim would change ranks: each rank scans its shard."),
    Patch("torch.nn.functional", "l1_loss", dropped_arguments.keeping("weight", 5),
          "It asks without its weight, and the loss would be that without."),
    Patch("torch.functional", "chain_matmul", dropped_arguments.keeping("out"),
          "It asks without `out`, which nobody would write."),
    Patch("torch.Tensor", "dim_order", dropped_arguments.keeping("ambiguity_check"),
          "It asks without `ambiguity_check`, and any order would be taken for the one."),
    Patch("torch", "compile", compiled.compile_without_weft,
          "TorchDynamo would trace weft itself; now it skips weft."),
    Patch("torch.random", "manual_seed seed", seeding.seed, "They seed weft's stream, too."),
    Patch("torch.random", "get_rng_state", seeding.get_rng_state,
          "The state includes weft's stream, so that fork_rng and checkpoints keep it."),
    Patch("torch.random", "set_rng_state", seeding.set_rng_state,
          "It restores weft's stream, too."),
    Patch("torch.distributions", "*.rsample *.sample", distributions.sample,
          "Samplers draw plain noise of a shape. It must have the layout of the parameters and "
          "come from weft's stream."),
    Patch("torch.nn.init", "sparse_", initial.sparse_,
          "It draws a plain permutation for each column."),
    Patch("torch.nn.init", "orthogonal_", initial.orthogonal_,
          "It transposes the drawn tensor in place."),
    Patch("torch.optim", "adadelta.adadelta adagrad.adagrad adam.adam adamax.adamax asgd.asgd "
          "nadam.nadam radam.radam rmsprop.rmsprop rprop.rprop sgd.sgd", updates.on_locals,
          "These updates are elementwise. They run on lists of local tensors, as fast as on "
          "plain tensors."),
    Patch("torch.optim", "_muon.muon", muon.at_owners,
          "Its iteration is of whole matrices: each goes to one rank, and comes back."),
    Patch("torch.nn.utils.clip_grad", "_get_total_norm", clipping.total_norm,
          "It takes a norm per gradient, each a collective, and in one call those of several "
          "meshes."),
    Patch("torch.nn.utils.clip_grad", "_clip_grads_with_norm_", clipping.clip_with_norm,
          "It scales gradients of several meshes in one call."),
    Patch("torch.optim.Optimizer", "add_param_group", optimizers.add_param_group,
          "An optimizer that was built before its module was distributed would step unused "
          "parameters: it is remembered and refused."),
    Patch("torch.optim.Optimizer", "_process_value_according_to_param_policy",
          optimizers.as_parameter, "Loaded state takes the layout of its parameter."),
    Patch("torch.nn.Parameter", "data", modules.set_data,
          "Assigning a ShardTensor to a plain parameter would end the process: refused."),
    Patch("torch.nn.Module", "load_state_dict", modules.load_state_dict,
          "With assign=True a full tensor would replace a distributed one, whole on every rank."),
    Patch("torch.nn.utils.convert_parameters", "vector_to_parameters",
          modules.vector_to_parameters,
          "A piece of the vector does not have the layout of its parameter."),
    Patch("torch._C._nn", "_parse_to", modules.parse_to,
          "module.to(x) would see a meta tensor; it takes dtype and device of the ShardTensor."),
    Patch("torch.nn.SyncBatchNorm", "forward", modules.sync_batch_norm,
          "It gathers statistics over a process group, but weft's batch_norm already has global "
          "ones."),
    Patch("torch.nn.RNNBase", "flatten_parameters", modules.flatten_parameters,
          "It moves weights into one block of memory by their addresses."),
    Patch("torch.distributed",
          "_all_gather_base _reduce_scatter_base all_gather all_gather_coalesced "
          "all_gather_into_tensor all_gather_single all_reduce all_reduce_coalesced all_to_all "
          "all_to_all_single broadcast gather irecv isend recv reduce reduce_scatter "
          "reduce_scatter_single reduce_scatter_tensor scatter send", wrappers.refuse_to_send,
          "They send a rank's own tensors, but a ShardTensor is one global value: refused."),
    Patch("torch.nn.parallel.DistributedDataParallel", "__init__",
          replicas.make, "It would sum gradients that weft has already summed: refused, except "
          "over ranks of other meshes."),
    Patch("torch.nn.parallel.DistributedDataParallel", "forward", replicas.forward,
          "Around a plain module it would also sum gradients of the global loss again: refused."),
    Patch(f"{_FSDP}._fully_shard._fully_shard", "fully_shard",
          wrappers.refusing("fully_shard(module)", 0),
          "It would shard each rank's block again: refused."),
    Patch(f"{_FSDP}.fully_sharded_data_parallel", "FullyShardedDataParallel.__init__",
          wrappers.refusing("FullyShardedDataParallel(module)", 1),
          "It would shard each rank's block again: refused."),
    Patch("torch.distributed.tensor._api", "DTensor.from_local",
          tracers.refusing("DTensor.from_local", _AS_DTENSOR),
          "Its local tensor would be a ShardTensor: refused."),
    Patch("torch.distributed.tensor._api", "distribute_tensor",
          tracers.refusing("torch.distributed.tensor.distribute_tensor", _AS_DTENSOR),
          "As DTensor.from_local it would hold a ShardTensor: refused."),
    Patch("torch.distributed.tensor.experimental._context_parallel._attention", "context_parallel",
          tracers.refusing("context_parallel", "leave it out: attention takes ShardTensors whose "
                           "sequence is sharded, in weft.zigzag's order for even work"),
          "It would shard each rank's block of its buffers again: refused."),
    Patch("torch.distributed.pipelining.stage", "_PipelineStageBase.__init__", wrappers.make_stage,
          "It would send ShardTensors to the next stage: they are gathered before."),
    Patch("torch.distributed.pipelining._backward", "stage_backward_input",
          zero_bubble.backward_input,
          "It looks for the weights in the graph, which has their local tensors."),
    Patch("torch.distributed.pipelining._backward", "stage_backward_weight",
          zero_bubble.backward_weight,
          "It would take gradients out of the graph that are yet to be reduced."),
    Patch("torch.distributed.checkpoint._state_dict_stager", "StateDictStager._offload_tensor",
          checkpoint.stage, "It copies what lies at an address: async_save copies blocks."),
    Patch("torch.distributed.checkpoint.state_dict_saver", "save", checkpoint.save,
          "A dry run has no data, and writes nothing; of simulated ranks the first writes for "
          "all."),
    Patch("torch.distributed.checkpoint.state_dict_saver", "async_save", checkpoint.async_save,
          "Its thread would use the process group that the training uses at the same time."),
    Patch("torch.distributed._state_dict_utils", "_iterate_state_dict", checkpoint.iterate,
          "Full tensors, and tensors on the CPU, are made of DTensors alone."),
    Patch("safetensors.torch", "save_file", safetensors.save_file,
          "It reads a tensor at its address: every rank writes its blocks."),
    Patch("safetensors.torch", "save_model", safetensors.save_model,
          "It finds tied tensors by their addresses."),
    Patch("transformers.modeling_utils", "PreTrainedModel.save_pretrained",
          safetensors.save_pretrained,
          "Only one rank would write: all do, each its blocks."),
    Patch("torch.autograd.profiler.profile", "_prepare_trace", profiling.prepare_trace,
          "A process has one profiler, but simulated ranks are threads of one process: refused "
          "with several ranks."),
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
    """The imported module or class of this name; None where there is none."""
    parts, found = name.split("."), None
    for end, part in enumerate(parts, 1):
        module = sys.modules.get(".".join(parts[:end]))
        # Of a lazy module getattr would import what it asks for.
        found = getattr(found, "__dict__", {}).get(part) if module is None else module
    return found


def install() -> None:
    """Replace them all. Once per process."""
    later: dict[str, list[Patch]] = {}
    for patch in PATCHES:
        if _found(patch.home) is None:
            later.setdefault(patch.home, []).append(patch)
        else:
            _replace(patch)
    sys.meta_path.insert(0, _AtImport(later))


def _replace(patch: Patch) -> None:
    for owner, name in functions_of(patch):
        replace(owner, name, patch.replacement)


class _AtImport(MetaPathFinder):
    """Finds the module that Python would find anyway, and replaces functions after its import."""

    def __init__(self, late: dict[str, list[Patch]]) -> None:
        self.late = late

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        patches = self.late.get(fullname, [])
        spec = PathFinder.find_spec(fullname, path, target) if patches else None
        if spec is None or spec.loader is None:
            return None
        loader, run = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for patch in patches:
                _replace(patch)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
