"""`--compile`: each transformer layer compiled by itself.

Only a layer's own forward is compiled. What is put around it, activation checkpointing and FSDP's
hooks, stays outside, and so does attention to trees, which goes by the layout of each micro-batch.
"""

from collections.abc import Iterable

import torch
from torch import nn

from agentrl.configs import ConfigError


def check_compiler(device: torch.device) -> None:
    """Raises `ConfigError` if `device` has nothing to compile for it."""
    try:
        torch.compile(_probe)(torch.ones(8, device=device))
    except RuntimeError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"--compile: no compiler works for {device.type} here ({reason}); a GPU needs Triton "
            "and a C compiler, a CPU a C++ compiler, or leave the flag out"
        ) from None


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile the forward pass of each layer, in place, at its first call."""
    for layer in layers:
        # micro-batches have many lengths: one graph for all of them
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _probe(values: torch.Tensor) -> torch.Tensor:
    return torch.sin(values) + 1
