"""The service that `agentrl serve` starts is an engine like any other."""

from conformance import GenerationConformance
from weight_conformance import MemoryConformance, WeightConformance


class TestGeneration(GenerationConformance):
    """See there."""


class TestWeights(WeightConformance):
    """See there."""


class TestMemory(MemoryConformance):
    """See there."""
