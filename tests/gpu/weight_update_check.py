"""The broadcast of weights from a trainer's process to a service's, with NCCL between two GPUs."""

import time
from pathlib import Path

import torch
from machine import Figures, Machine, require
from torch import Tensor, multiprocessing

from agentrl.inference.weights.buckets import in_buckets
from agentrl.inference.weights.group import Backend, WeightGroup, host_store, reach_store

_UPDATES = 3  # over one group, which is kept between updates; the first sets up connections
_TIMEOUT_S = {True: 60.0, False: 600.0}  # on two GPUs, and in the stand-in
_ADDRESS = "127.0.0.1"


def broadcast(machine: Machine, figures: Figures) -> None:
    """GB/s of the last update; every tensor must come as it was sent, bit for bit."""
    store = host_store(_ADDRESS, _TIMEOUT_S[machine.on_gpu])
    came = machine.folder / "came"
    receiver = multiprocessing.get_context("spawn").Process(
        target=_receive, args=(store.port, machine.on_gpu, came)
    )
    receiver.start()
    group = _group(store, machine.on_gpu, rank=0)
    device = _device(machine.on_gpu, 0)
    for update in range(_UPDATES):
        weights = _weights(update, machine.on_gpu, device)
        began = time.perf_counter()
        for bucket in in_buckets(weights):
            group.send(list(bucket.values()))
        seconds = time.perf_counter() - began
    sent = sum(tensor.nbytes for tensor in weights.values())
    receiver.join(_TIMEOUT_S[machine.on_gpu])
    figures.add(gb=round(sent / 1e9, 3), gb_per_s=round(sent / 1e9 / seconds, 2))
    require(receiver.exitcode == 0, f"the receiver ended with status {receiver.exitcode}")
    wrong = came.read_text()
    require(not wrong, f"tensors came changed: {wrong}")


def _receive(port: int, on_gpu: bool, came: Path) -> None:
    """Receive all updates; write to `came` which tensors are not those that were sent."""
    device = _device(on_gpu, 1)
    group = _group(reach_store(_ADDRESS, port, _TIMEOUT_S[on_gpu]), on_gpu, rank=1)
    wrong = []
    for update in range(_UPDATES):
        expected = _weights(update, on_gpu, device)
        for bucket in in_buckets(expected):
            tensors = group.receive([(t.dtype, t.shape) for t in bucket.values()])
            wrong += [
                f"{name} of update {update}"
                for (name, sent), tensor in zip(bucket.items(), tensors, strict=True)
                if not torch.equal(tensor, sent)
            ]
    came.write_text(", ".join(wrong))


def _group(store: torch.distributed.TCPStore, on_gpu: bool, rank: int) -> WeightGroup:
    backend: Backend = "nccl" if on_gpu else "gloo"
    return WeightGroup(
        store,
        rank=rank,
        world_size=2,
        name="check",
        backend=backend,
        device=_device(on_gpu, rank),
        timeout_s=_TIMEOUT_S[on_gpu],
    )


def _device(on_gpu: bool, rank: int) -> torch.device:
    if not on_gpu:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _weights(seed: int, on_gpu: bool, device: torch.device) -> dict[str, Tensor]:
    """The same in both processes, therefore drawn on the CPU: 1.2 GB, in the stand-in 1.6 MB."""
    random = torch.Generator().manual_seed(seed)
    width = 4096 if on_gpu else 256
    shapes = {
        "up_proj.weight": ((2 * width, width), torch.bfloat16),
        "norm.bias": ((width + 1,), torch.float32),
    }
    return {
        f"model.layers.{layer}.mlp.{name}": torch.randn(shape, generator=random)
        .to(dtype)
        .to(device)
        for layer in range(18 if on_gpu else 6)
        for name, (shape, dtype) in shapes.items()
    }
