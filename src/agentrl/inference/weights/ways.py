"""The ways of `--weight_update` by name."""

import torch

from agentrl.inference.weights.disk import DiskUpdater
from agentrl.inference.weights.distributed import DistributedUpdater
from agentrl.inference.weights.tensor import TensorUpdater
from agentrl.inference.weights.updates import WeightUpdater


def make_updater(way: str, device: torch.device) -> WeightUpdater:
    """The updater of a way; `device` is the trainer's, from which `distributed` sends."""
    if way == "distributed":
        return DistributedUpdater(device)
    if way == "tensor":
        return TensorUpdater()
    assert way == "disk"
    return DiskUpdater()
