"""Expert parallelism: distributes the experts of a mixture over processes.

The model's own plan names the modules with experts, and transformers' all-to-all sends each token
to the process of its expert and back. This module also shards the experts with FSDP2 and scales
their gradients like those of other parameters.
"""

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism

from agentrl.training.parallel.mesh import Mesh

_DISPATCHED = "ep_dispatch_experts"  # transformers' name of the style of a module with experts


def apply_expert_parallel(model: PreTrainedModel, mesh: Mesh) -> None:
    """Spread the experts of `model` in place over groups of `mesh.sizes.ep` processes."""
    if mesh.experts is None:
        return
    # Always all-to-all: transformers' default without gradients sums in another order, and a
    # reference policy must compute the same numbers as the policy.
    apply_expert_parallelism(
        model, mesh.experts["ep"], mesh.dense["tp"], _plan(model, mesh), "all_to_all"
    )


def shard_experts(
    model: PreTrainedModel, mesh: Mesh, policy: MixedPrecisionPolicy, offload: OffloadPolicy
) -> None:
    """Make each expert module an FSDP2 unit over the processes that hold the same experts."""
    if mesh.experts is None:
        return
    names = ("dp_replicate", "efsdp") if mesh.sizes.dp_replicate > 1 else ("efsdp",)
    for module in _expert_modules(model, mesh):
        fully_shard(module, mesh=mesh.experts[names], mp_policy=policy, offload_policy=offload)
        assert isinstance(module, FSDPModule)
        # An expert gets the tokens of all processes of its group, so its gradient covers as many
        # sequences as any other's, though fewer processes reduce it.
        module.set_gradient_divide_factor(float(mesh.sizes.dp * mesh.sizes.cp))
        if mesh.sizes.efsdp > 1:
            # gloo refuses the reduction that scales, and NCCL gets it wrong in bfloat16
            module.set_force_sum_reduction_for_comms(True)


def _expert_modules(model: PreTrainedModel, mesh: Mesh) -> list[nn.Module]:
    plan = _plan(model, mesh)
    return [module for name, module in model.named_modules() if plan.get(name) == _DISPATCHED]


def _plan(model: PreTrainedModel, mesh: Mesh) -> dict[str, str]:
    _, plan, _ = model._resolve_parallel_plans(
        DistributedConfig(tp_size=mesh.sizes.tp, fsdp_size=mesh.sizes.fsdp, ep_size=mesh.sizes.ep)
    )
    return dict(plan)
