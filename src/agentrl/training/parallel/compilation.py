"""`--compile`: compiles each transformer layer with torch.compile.

Only the layer's forward is compiled. Activation checkpointing, FSDP's hooks and tree attention,
which depends on the layout of each micro-batch, are not.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from agentrl.configs import ComputeConfig, ConfigError


def check_compiler(device: torch.device) -> None:
    """Raise `ConfigError` if no compiler works for `device`."""
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
        # One graph for all lengths of micro-batches.
        layer.forward = torch.compile(layer.forward, dynamic=True)


def uncompiled(compute: ComputeConfig) -> AbstractContextManager[object]:
    """In the block compiled layers run as they are written."""
    # Without --compile the compiler is not even imported.
    return torch.compiler.set_stance("force_eager") if compute.compile else nullcontext()


def _probe(values: torch.Tensor) -> torch.Tensor:
    return torch.sin(values) + 1
