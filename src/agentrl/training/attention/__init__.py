"""Attention over forests: every shared token computed once, exact, forward and backward.

layout       where nodes stand and which calls that makes; pure
tree         `tree_attention`, the entry
nodewise     the autograd function and the interface of kernels
cpu, cuda    the kernels of devices
prefix_keys  what a forward pass carries to its layers; keys and values of a shared prefix
models       registration with transformers, and which models can have it
"""

from agentrl.training.attention.layout import TreeLayout
from agentrl.training.attention.models import (
    IMPLEMENTATION,
    has_tree_attention,
    use_tree_attention,
    why_no_trees,
)
from agentrl.training.attention.prefix_keys import SharedPrefix, TreeContext
from agentrl.training.attention.shared import (
    SHARED_IMPLEMENTATION,
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
    "tree_attention",
    "use_tree_attention",
    "why_no_trees",
]
