"""Checks of code that is spoilt in the way that each is to find, for the tests of the checks."""

import state_checks
from machine import Figures, Machine

from agentrl.training.model.weight_gathering import WeightGatherer


def staging(machine: Machine, figures: Figures) -> None:
    """The optimizer does not wait for the copy."""
    WeightGatherer._hold_update = lambda *_: None  # type: ignore[method-assign]
    state_checks.staging(machine, figures)
