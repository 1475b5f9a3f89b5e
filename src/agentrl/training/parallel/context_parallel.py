"""Context parallelism of a model: its processes share each line of tokens."""

from transformers import PreTrainedModel

from agentrl.training.attention import (
    SHARED_IMPLEMENTATION,
    AllGather,
    SharedLine,
    Ulysses,
)
from agentrl.training.parallel.mesh import Mesh

_MODES: dict[str, type[SharedLine]] = {"ulysses": Ulysses, "allgather": AllGather}


def apply_context_parallel(model: PreTrainedModel, mesh: Mesh) -> SharedLine | None:
    """Make the attention of `model` context-parallel over `mesh.cp_group`, in place.

    Returns this process's `SharedLine`; None without context parallelism.
    """
    if mesh.sizes.cp == 1:
        return None
    model.set_attn_implementation(SHARED_IMPLEMENTATION)
    return _MODES[mesh.context_mode](mesh.cp_group)
