"""Tensor parallelism: splits matrices over processes by the model's own plan.

transformers has a plan of row-wise and column-wise projections for each model. Its head gathers the
logits; here each process keeps the logits of its part of the vocabulary, and `logprobs` reduces
over the parts. Which modules the plan forgot is found by `step.partial_gradients`.
"""

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from agentrl.training.parallel.mesh import Mesh

_PLANNED = "_is_hooked"  # transformers' mark of modules in a plan


def apply_tensor_parallel(model: PreTrainedModel, mesh: Mesh) -> None:
    """Split the matrices of `model` in place over `mesh.tp_group`, if there is more than one rank.

    Every process slices its own copy, so all must have the same weights.
    """
    if mesh.sizes.tp == 1:
        return
    plan, _, _ = model._resolve_parallel_plans(
        DistributedConfig(tp_size=mesh.sizes.tp, fsdp_size=mesh.sizes.fsdp, ep_size=mesh.sizes.ep)
    )
    plan = _with_split_logits(model, plan)
    tied = model.all_tied_weights_keys  # tied names, which are not parameters, to their source
    plan = {name: style for name, style in plan.items() if name not in tied}
    apply_tensor_parallelism(model, mesh.dense["tp"], plan)
    for name, source in tied.items():
        _set_parameter(model, name, model.get_parameter(source))


def unplanned_modules(model: nn.Module) -> dict[str, nn.Module]:
    """By name, the modules that no plan mentions and that have weights of their own to train."""
    return {
        name: module
        for name, module in model.named_modules()
        if not hasattr(module, _PLANNED)
        and any(weight.requires_grad for weight in module.parameters(recurse=False))
    }


def whole_weights(model: nn.Module) -> dict[str, DTensor]:
    """By name, the weights to train that every process of tensor parallelism has whole.

    `model`: sharded; over data these weights may be.
    """
    return {
        name: weight
        for name, weight in model.named_parameters()
        if weight.requires_grad
        and isinstance(weight, DTensor)
        and not {"tp", "ep"} & set(weight.device_mesh.mesh_dim_names or ())
    }


def sum_gradients(module: nn.Module, mesh: Mesh) -> None:
    """From now on, sum the gradients of the module's own weights over `mesh.tp_group`, in place."""
    ALL_PARALLEL_STYLES["replicated_with_grad_allreduce"].install_forward(module, mesh.dense["tp"])
    setattr(module, _PLANNED, True)


def _with_split_logits(model: PreTrainedModel, plan: dict[str, str]) -> dict[str, str]:
    """The plan with a `colwise` head, which does not gather its logits."""
    head = model.get_output_embeddings()
    own = {name for name, module in model.named_modules() if module is head}
    own |= {f"{name}.{parameter}" for name in own for parameter in ("weight", "bias")}
    return {name: "colwise" if name in own else style for name, style in plan.items()}


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module), attribute, parameter)
