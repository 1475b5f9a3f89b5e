"""The share of a sampler process in the limits of its machine.

`--max_concurrent_samples_per_process` holds for each process, `--target_concurrency` for all
together. The launcher passes each process its number in an environment variable.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from agentrl.configs import Config

_VARIABLE = "AGENTRL_SAMPLER_PROCESS"


@dataclass(frozen=True, slots=True)
class ProcessShare:
    """Process `number` of `count`, counted from 0."""

    number: int = 0
    count: int = 1

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self | None:
        """The share of this process; None if the environment does not say."""
        told = environment.get(_VARIABLE)
        if told is None:
            return None
        number, _, count = told.partition("/")
        return cls(int(number), int(count))

    @property
    def environment(self) -> dict[str, str]:
        """The environment variable for a process with this share."""
        return {_VARIABLE: f"{self.number}/{self.count}"}

    @staticmethod
    def processes(wanted: int, target: int) -> int:
        """How many processes to start: no more than `target` trajectories, if that is not 0."""
        return min(wanted, target) if target else wanted

    def of(self, total: int) -> int:
        """This process's part of `total`; at least 1 unless `total` is 0."""
        part = total // self.count + (self.number < total % self.count)
        return max(1, part) if total else 0

    def config(self, config: Config) -> Config:
        """The flags of this process, with its part of `--target_concurrency`."""
        target = self.of(config.sampling.target_concurrency)
        return replace(config, sampling=replace(config.sampling, target_concurrency=target))
