"""Tensor parallelism: matrices split over processes by the model's own plan.

transformers knows for each model which projections are split by rows and which by columns; what it
resolves of that plan is applied here. Its head gives back whole logits; here each process keeps
those of its part of the vocabulary, and `logprobs` sums over the parts.
"""

from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from agentrl.training.parallel.mesh import Mesh


def apply_tensor_parallel(model: PreTrainedModel, mesh: Mesh) -> None:
    """Split the matrices of `model` in place over `mesh.tp_group`; without TP nothing happens.

    Every process slices its own copy, so all must hold the same weights.
    """
    if mesh.sizes.tp == 1:
        return
    plan, _, _ = model._resolve_parallel_plans(
        DistributedConfig(tp_size=mesh.sizes.tp, fsdp_size=mesh.sizes.fsdp, ep_size=mesh.sizes.ep)
    )
    plan = _with_split_logits(model, plan)
    tied = model.all_tied_weights_keys  # by the name under which they are not parameters
    plan = {name: style for name, style in plan.items() if name not in tied}
    apply_tensor_parallelism(model, mesh.dense["tp"], plan)
    for name, source in tied.items():
        _set_parameter(model, name, model.get_parameter(source))


def _with_split_logits(model: PreTrainedModel, plan: dict[str, str]) -> dict[str, str]:
    """The plan with a head that does not gather its logits: `colwise`, as projections have it."""
    head = model.get_output_embeddings()
    own = {name for name, module in model.named_modules() if module is head}
    own |= {f"{name}.{parameter}" for name in own for parameter in ("weight", "bias")}
    return {name: "colwise" if name in own else style for name, style in plan.items()}


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module), attribute, parameter)
