"""The device of a check, for torch: the first GPU, or the CPU for a stand-in."""

import torch
from accelerate import Accelerator
from machine import Machine

from agentrl.configs import ParallelConfig
from agentrl.training.parallel import Mesh, make_mesh


def device_of(machine: Machine) -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda", 0) if machine.on_gpu else torch.device("cpu")


def device_name(machine: Machine) -> str:
    """What the GPU calls itself, or cpu."""
    return torch.cuda.get_device_name(0) if machine.on_gpu else "cpu"


def mesh_of(machine: Machine) -> Mesh:
    """The mesh of this process alone, as the trainer makes it."""
    return make_mesh(Accelerator(cpu=not machine.on_gpu), ParallelConfig())


def synchronise(machine: Machine) -> None:
    """Wait until the device has computed everything."""
    if machine.on_gpu:
        torch.cuda.synchronize()
