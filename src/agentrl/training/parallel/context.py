"""Context parallelism of a model: its processes share each line of tokens."""

from transformers import PreTrainedModel

from agentrl.configs import ConfigError
from agentrl.training.attention import (
    SHARED_IMPLEMENTATION,
    AllGather,
    SharedLine,
    Ulysses,
    why_no_trees,
)
from agentrl.training.parallel.mesh import Mesh

_MODES: dict[str, type[SharedLine]] = {"ulysses": Ulysses, "allgather": AllGather}


def share_lines(model: PreTrainedModel, mesh: Mesh) -> SharedLine | None:
    """Let `model` attend over lines that the context-parallel processes of `mesh` share.

    Returns how they share them, or None if each has its own. Raises `ConfigError` if the model's
    attention is not one that can be shared.
    """
    if mesh.sizes.cp == 1:
        return None
    reason = why_no_trees(model)
    if reason is not None:
        raise ConfigError(
            f"--cp_size {mesh.sizes.cp}: context parallelism is made of tree attention, which "
            f"{type(model).__name__} cannot have: {reason}"
        )
    model.set_attn_implementation(SHARED_IMPLEMENTATION)
    return _MODES[mesh.context_mode](mesh.cp_group)
