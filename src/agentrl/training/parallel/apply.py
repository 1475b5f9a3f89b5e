"""Parallelism applied to a model, top to bottom in the order it happens.

Accelerate launches the processes and reads the environment; it does not wrap the model, because it
never enables FSDP2 on CPU and says nothing about it. What is asked for here is therefore asserted
afterwards. One process is a mesh of one and takes the same path.
"""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agentrl.training.logprobs import attach_logprobs
from agentrl.training.parallel.experts import shard_experts, spread_experts
from agentrl.training.parallel.limits import check_model
from agentrl.training.parallel.mesh import Mesh
from agentrl.training.parallel.tensor import split_matrices

MASTER_DTYPE = torch.float32


def parallelise(
    model: PreTrainedModel,
    mesh: Mesh,
    *,
    bf16: bool = False,
    gradient_checkpointing: bool = False,
) -> None:
    """Apply all parallelism to `model` in place and attach `token_logprobs`.

    `model` holds float32 weights, the same on every rank. With `bf16` it computes in bfloat16,
    with float32 master weights and float32 gradient reduction. Raises `ConfigError` if the model
    cannot be divided as asked, `RuntimeError` if the sharding is not what was asked for.
    """
    check_model(model.config, mesh.sizes, mesh.context_mode)
    nn.Module.to(model, mesh.device)  # transformers' own wrapper of it has lost its types
    split_matrices(model, mesh)
    spread_experts(model, mesh)
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    _shard(model, mesh, bf16)
    _check_sharded(model)
    attach_logprobs(model)


def _shard(model: PreTrainedModel, mesh: Mesh, bf16: bool) -> None:
    """FSDP2 units: spread experts, each transformer layer, and the root with all else.

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
    shard_experts(model, mesh, policy)
    reshard = mesh.sizes.fsdp > 1  # alone there is nothing to give back
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh.fsdp_mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh.fsdp_mesh, mp_policy=policy, reshard_after_forward=False)


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


def _check_sharded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or not _has_fsdp(parameter):
            raise RuntimeError(f"parameter {name} is not sharded over the processes")
        if parameter.dtype != MASTER_DTYPE:
            raise RuntimeError(f"parameter {name} has master weights in {parameter.dtype}")


def _has_fsdp(parameter: DTensor) -> bool:
    return bool({"fsdp", "efsdp"} & set(parameter.device_mesh.mesh_dim_names or ()))
