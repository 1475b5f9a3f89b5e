"""Applies all parallelism to a model, in order.

Accelerate launches the processes and reads the environment. It does not wrap the model, because it
silently does not enable FSDP2 on a CPU. The result is checked here. One process is a mesh of one
and takes the same path.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agentrl.configs import ComputeConfig, ConfigError
from agentrl.training.attention import SharedLine
from agentrl.training.parallel.compilation import compile_layers
from agentrl.training.parallel.context_parallel import apply_context_parallel
from agentrl.training.parallel.experts import apply_expert_parallel, shard_experts
from agentrl.training.parallel.limits import check_degrees
from agentrl.training.parallel.mesh import Mesh
from agentrl.training.parallel.offload import offload_activations
from agentrl.training.parallel.tensor import apply_tensor_parallel

MASTER_DTYPE = torch.float32


def parallelise(model: PreTrainedModel, mesh: Mesh, compute: ComputeConfig) -> SharedLine | None:
    """Apply all parallelism and the options of `compute` to `model` in place.

    `model` has float32 weights, the same on every rank; frozen ones may have another dtype. Returns
    the `SharedLine` of context parallelism, None without it. Raises `ConfigError` if the model
    cannot be divided by the mesh or has no activation checkpointing, and `RuntimeError` if a
    parameter is not sharded as expected.
    """
    check_degrees(model, mesh.sizes, mesh.context_mode)
    if compute.gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"--gradient_checkpointing: {type(model).__name__} has none in transformers; train it "
            "without the flag, with a smaller --micro_batch_tokens if memory runs out"
        )
    _to_device(model, mesh.device)
    apply_tensor_parallel(model, mesh)
    apply_expert_parallel(model, mesh)
    line = apply_context_parallel(model, mesh)
    if compute.compile:
        compile_layers(transformer_layers(model))
    if compute.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if compute.activation_offloading:
        offload_activations(model)
    _shard(model, mesh, compute)
    _check_sharded(model)
    return line


def _shard(model: PreTrainedModel, mesh: Mesh, compute: ComputeConfig) -> None:
    """FSDP2 units: expert modules, each transformer layer, and the root with the rest.

    The root has embedding, norm and head. It stays gathered until the end of the backward pass,
    because ranks may have different numbers of head chunks, which must not be collectives, and
    because an embedding tied to the head is one parameter and must be in one unit.
    """
    # Inputs are not cast: sampling temperatures would lose precision, and hidden states have the
    # parameters' dtype anyway.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if compute.bf16 else None,
        reduce_dtype=MASTER_DTYPE,
        cast_forward_inputs=False,
    )
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
        if compute.param_offload
        else OffloadPolicy()
    )
    shard_experts(model, mesh, policy, offload)
    # A single process need not reshard, unless its shards are in host memory.
    reshard = mesh.sizes.fsdp > 1 or compute.param_offload
    unit = partial(fully_shard, mesh=mesh.fsdp_mesh, mp_policy=policy, offload_policy=offload)
    for layer in transformer_layers(model):
        unit(layer, reshard_after_forward=reshard)
    unit(model, reshard_after_forward=False)
    if mesh.sizes.dp_replicate > 1:
        # Sums of passes that are not reduced over replicas yet must have the same parameters, and a
        # pass over a prefix does not use the head.
        assert isinstance(model, FSDPModule)
        model.set_reduce_scatter_unused_params(True)


def _to_device(model: nn.Module, device: torch.device) -> None:
    """Move tensors with values to the device. Meta tensors get values after sharding."""
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def transformer_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer layers: the modules of the classes in `_no_split_modules`."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise RuntimeError(
            f"{type(model).__name__} does not name its layers (_no_split_modules): it cannot be "
            "sharded layer by layer"
        )
    return layers


def _check_sharded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or not _has_fsdp(parameter):
            raise RuntimeError(f"parameter {name} is not sharded over the processes")
        if parameter.requires_grad and parameter.dtype != MASTER_DTYPE:
            raise RuntimeError(f"parameter {name} has master weights in {parameter.dtype}")


def _has_fsdp(parameter: DTensor) -> bool:
    return bool({"fsdp", "efsdp"} & set(parameter.device_mesh.mesh_dim_names or ()))
