"""The probe of a model folder by itself, in this process and on the CPU: for `agentrl doctor`."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator

from agentrl.configs import ComputeConfig, ModelConfig
from agentrl.training.model.loading import empty_model, fill
from agentrl.training.model.prepare import prepare_model
from agentrl.training.parallel import make_mesh
from agentrl.training.step.probe import Verdict, probe


def memory_to_probe(folder: Path) -> int:
    """About how many bytes `probe_folder` takes: weights and gradients in float32.

    The weights of the folder are taken for bfloat16, so that smaller types are underestimated.
    """
    return 4 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def free_memory() -> int:
    """The bytes of memory that no process uses."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def probe_folder(config: ModelConfig, longest: int) -> Verdict:
    """Probe the model of a folder, in float32. `longest`: tokens of the longest row that may come.

    Raises `ConfigError` if the model cannot be loaded. No process group may exist.
    """
    model, compute = empty_model(config), ComputeConfig()
    mesh = make_mesh(Accelerator(cpu=True))
    try:
        prepare_model(model, mesh, compute, trees=config.attends_over_trees)
        fill(model, config, mesh, torch.device("cpu"))
        return probe(model, mesh, compute, longest, trees=config.attends_over_trees)
    finally:
        dist.destroy_process_group()
