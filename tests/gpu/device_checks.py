"""Whether torch computes on the device at all, and how fast it multiplies."""

import time

import torch
from machine import Figures, Machine, require
from on_device import device_name, device_of, synchronise

from agentrl.training.data.flops import peak_flops

_ROUNDS = 10


def matrix_product(machine: Machine, figures: Figures) -> None:
    """A product in bfloat16 is right, at a rate."""
    if machine.on_gpu:
        require(
            torch.cuda.is_available(),
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) does not reach the GPU: its "
            "build or the driver does not fit",
        )
        require(
            torch.cuda.device_count() >= machine.gpus,
            f"torch sees {torch.cuda.device_count()} of {machine.gpus} GPUs",
        )
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        capability = ".".join(map(str, torch.cuda.get_device_capability(0)))
        figures.add(cuda=torch.version.cuda, nccl=nccl, capability=capability)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator).bfloat16() for _ in range(2))
    product = (a.to(device_of(machine)) @ b.to(device_of(machine))).cpu().double()
    exact = a.double() @ b.double()
    error = float((product - exact).abs().max() / exact.abs().max())
    figures.add(relative_error=error)
    require(error < 0.01, f"a product of matrices is wrong by {error:.2g} of its largest entry")
    stated = peak_flops(device_name(machine))
    rate = matrix_rate(machine)
    figures.add(tflops=round(rate / 1e12, 2), of_data_sheet=stated and round(rate / stated, 3))


def matrix_rate(machine: Machine) -> float:
    """Operations a second of large products in bfloat16: the most that a step could reach here."""
    size = 8192 if machine.on_gpu else 512
    a = torch.ones(size, size, dtype=torch.bfloat16, device=device_of(machine))
    a @ a
    synchronise(machine)
    began = time.perf_counter()
    for _ in range(_ROUNDS):
        a @ a
    synchronise(machine)
    return float(_ROUNDS * 2 * size**3 / (time.perf_counter() - began))
