"""Checks of code that is spoilt in the way that each is to find, for the tests of the checks."""

from collections.abc import Mapping
from pathlib import Path

import service_checks
import state_checks
from machine import Figures, Machine
from safetensors.torch import load_file
from torch import Tensor

from agentrl.inference.weights.updates import PublishedWeights
from agentrl.training.model.weight_gathering import WeightGatherer


def staging(machine: Machine, figures: Figures) -> None:
    """The optimizer does not wait for the copy."""
    WeightGatherer._hold_update = lambda *_: None  # type: ignore[method-assign]
    state_checks.staging(machine, figures)


def update(machine: Machine, figures: Figures) -> None:
    """The service gets the weights that it began with, as if it loaded nothing."""

    def old_weights(version: int, folder: Path, _: Mapping[str, Tensor]) -> PublishedWeights:
        old = folder.with_name("weights-0")
        return PublishedWeights(version, old, load_file(old / "model.safetensors"))

    service_checks.PublishedWeights = old_weights  # type: ignore[misc, assignment]
    service_checks.update(machine, figures)
