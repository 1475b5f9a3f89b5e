"""Exact attention over forests of tokens, in which each shared token is computed once.

layout       positions of nodes, and the attention calls that they need; pure
tree         `tree_attention`, the entry
nodewise     the autograd function and the interface of kernels
cpu, flash   the kernels of CPU and CUDA
blocks       the calls as the CPU's kernel takes them with little waste; pure
flex         FlexAttention, for CUDA in float32
prefix_keys  the context of a forward pass; keys and values of a shared prefix
shared       context parallelism
models       registration with transformers, and the models that support it
"""

from agentrl.training.attention.layout import TreeLayout
from agentrl.training.attention.models import (
    IMPLEMENTATION,
    SHARED_IMPLEMENTATION,
    has_tree_attention,
    line_limit,
    recorded_windows,
    use_tree_attention,
    why_no_trees,
)
from agentrl.training.attention.prefix_keys import SharedPrefix, TreeContext
from agentrl.training.attention.shared import (
    AllGather,
    SharedLine,
    Ulysses,
)
from agentrl.training.attention.tree import tree_attention

__all__ = [
    "IMPLEMENTATION",
    "SHARED_IMPLEMENTATION",
    "AllGather",
    "SharedLine",
    "SharedPrefix",
    "TreeContext",
    "TreeLayout",
    "Ulysses",
    "has_tree_attention",
    "line_limit",
    "recorded_windows",
    "tree_attention",
    "use_tree_attention",
    "why_no_trees",
]
