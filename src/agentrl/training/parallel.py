"""The one place where parallelism is applied to a model, top to bottom in the order it happens.

This version: activation checkpointing, then FSDP2 over all processes. Accelerate launches the
processes and reads the environment; it does not wrap the model, because it never enables FSDP2 on
CPU and says nothing about it. What is asked for here is therefore asserted afterwards. One process
is a mesh of one and takes the same path.
"""

import os
import sys
from typing import NoReturn

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agentrl.training.compilation import compile_layers
from agentrl.training.logprobs import attach_logprobs
from agentrl.training.offload import offload_activations

MASTER_DTYPE = torch.float32


def check_launch(accelerator: Accelerator) -> None:
    """Refuse a launch whose processes do not know of each other.

    Raises `RuntimeError` if the launcher started another number of processes than Accelerate sees.
    """
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != asked:
        raise RuntimeError(
            f"the launcher started {asked} processes and Accelerate sees "
            f"{accelerator.num_processes}: launch with assets/fsdp2_cpu.yml or "
            "assets/fsdp2_dst.yml, whose distributed_type is MULTI_GPU"
        )


def join_processes(accelerator: Accelerator) -> None:
    """Make the process group, of one process if it is alone.

    Raises `RuntimeError` if the launch is not what was asked for, see `check_launch`.
    """
    check_launch(accelerator)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if accelerator.device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend=backend, store=store, rank=0, world_size=1)


def parallelise(
    model: PreTrainedModel,
    accelerator: Accelerator,
    *,
    bf16: bool = False,
    gradient_checkpointing: bool = False,
    activation_offloading: bool = False,
    param_offload: bool = False,
    compiled: bool = False,
) -> None:
    """Apply all parallelism to `model` in place and attach `token_logprobs`.

    `model` holds float32 weights, the same on every rank; what is not trained may be in another
    type. With `bf16` it computes in bfloat16, with float32 master weights and float32 gradient
    reduction. With `param_offload` shards and gradients live on the CPU. Raises `RuntimeError` if
    the launch or the sharding is not what was asked for.
    """
    join_processes(accelerator)
    mesh = init_device_mesh(
        accelerator.device.type, (accelerator.num_processes,), mesh_dim_names=("dp_shard",)
    )
    model.to(accelerator.device)
    if compiled:
        compile_layers(_layers(model))
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if activation_offloading:
        offload_activations(model)
    _shard(model, mesh, bf16, param_offload)
    _check_sharded(model, accelerator.num_processes)
    attach_logprobs(model)


def exit_process(status: int) -> NoReturn:
    """End a process that has used collectives, without finalising Python.

    A worker thread of gloo lets go of a collective's tensors only after it has woken the waiter,
    and needs the interpreter for that. Should Python finalise just then, it ends the thread in the
    middle of a destructor, which aborts a process that has done all its work.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Clip the gradients to `max_norm` (0: do not) and return their norm before, over all ranks."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def scale_for_mean_reduction(loss: Tensor) -> Tensor:
    """FSDP2 averages gradients over ranks; a loss that is a share of a global sum wants their sum.

    `loss`: this rank's sum over its tokens, divided by the global count.
    """
    return loss * dist.get_world_size()


def _shard(model: PreTrainedModel, mesh: DeviceMesh, bf16: bool, param_offload: bool) -> None:
    """FSDP2 units: each transformer layer, and the root with all else.

    Embedding, norm and head are the root's own. It stays gathered from the first token to the end
    of the backward pass, so that the head's chunks, which a rank may have more of than another,
    cause no collective; and an embedding tied to the head is one parameter, to be in one unit.
    """
    # Inputs are not cast: the sampling temperatures among them would lose digits, and hidden states
    # have the parameters' type anyway.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=MASTER_DTYPE,
        cast_forward_inputs=False,
    )
    # Alone there is nothing to give back, unless the shards live elsewhere.
    reshard = mesh.size() > 1 or param_offload
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if param_offload
        else OffloadPolicy()
    )
    for layer in _layers(model):
        fully_shard(
            layer, mesh=mesh, mp_policy=policy, offload_policy=offload,
            reshard_after_forward=reshard,
        )  # fmt: skip
    fully_shard(
        model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False
    )


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer layers: the modules of the classes that must not be split."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise RuntimeError(
            f"{type(model).__name__} does not name its layers (_no_split_modules): it cannot be "
            "sharded layer by layer"
        )
    return layers


def _check_sharded(model: nn.Module, ranks: int) -> None:
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.device_mesh.size() != ranks:
            raise RuntimeError(f"parameter {name} is not sharded over {ranks} processes")
        if parameter.requires_grad and parameter.dtype != MASTER_DTYPE:
            raise RuntimeError(f"parameter {name} has master weights in {parameter.dtype}")
