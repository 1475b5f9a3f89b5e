"""The updaters by their names in `--weight_update`."""

import torch

from agentrl.inference.weights.disk import DiskUpdater
from agentrl.inference.weights.distributed import DistributedUpdater
from agentrl.inference.weights.tensor import TensorUpdater
from agentrl.inference.weights.updates import WeightUpdater


def make_updater(way: str, device: torch.device) -> WeightUpdater:
    """Make the updater of that name. `device`: the trainer's, which `distributed` sends from."""
    if way == "distributed":
        return DistributedUpdater(device)
    if way == "tensor":
        return TensorUpdater()
    assert way == "disk"
    return DiskUpdater()
