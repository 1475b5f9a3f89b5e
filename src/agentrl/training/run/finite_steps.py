"""Handles steps whose gradient is not finite.

    gradient not finite -> its rows are looked at -> those that are the cause are quarantined
                                                  -> the step is made of the others
                        -> no row is it alone, or all are -> all are quarantined, and the step
                           leaves the weights as they are

It is the gradient of the policy or of its critic: a step is finite for both, or made for neither.
Every process does the same, because a gradient is the same on all.
"""

import logging
from collections.abc import Callable, Mapping

from agentrl.training.data.stream import StepRows
from agentrl.training.parallel.agreement import known_to_all
from agentrl.training.step.culprits import NonFiniteGradient
from agentrl.training.step.learner import Learner
from agentrl.training.step.statistics import StepStatistics

logger = logging.getLogger(__name__)

_MOST_SKIPPED = 3  # steps in a row that leave the weights alone


class GradientKeepsFailing(FloatingPointError):
    """The gradients of several steps in a row are not finite. The message is one sentence."""


class FiniteSteps:
    """The steps of a learner. `quarantine`: of rows of a step, with why, by id; collective."""

    def __init__(
        self, learner: Learner, quarantine: Callable[[int, Mapping[str, str]], None], run: str
    ) -> None:
        self._learner = learner
        self._quarantine = quarantine
        self._run = run
        self._skipped = 0  # steps in a row without a finite gradient

    def take(
        self, step: int, rows: StepRows, between_passes: Callable[[], None]
    ) -> tuple[StepStatistics | None, StepRows]:
        """Train on the rows of a step. Returns also those that it was of; no statistics of a step
        that left the weights alone.

        Collective. Raises `GradientKeepsFailing` when that happens again and again, and what
        `between_passes` raises.
        """
        try:
            statistics = self._learner.step(rows.mine, between_passes)
        except NonFiniteGradient as error:
            logger.error("step %d: %s; its rows are looked at one by one", step, error)
            everywhere = {row for of_rank in rows.ids for row in of_rank}
            culprits = self._learner.culprits(rows.ids, rows.mine)
            self._take_out(
                step, {row: f"{gradient} is not finite" for row, gradient in culprits.items()}
            )
            rest = everywhere - culprits.keys()
            rows = rows.only(rest)
            try:
                if not culprits or not rest:
                    raise
                statistics = self._learner.step(rows.mine, between_passes)
            except NonFiniteGradient:
                self._take_out(step, dict.fromkeys(rest, "the gradient of its step is not finite"))
                self._skip(error)
                return None, rows.only(())
        self._skipped = 0
        return statistics, rows

    def _skip(self, error: NonFiniteGradient) -> None:
        self._skipped += 1
        if self._skipped >= _MOST_SKIPPED:
            failing = GradientKeepsFailing(
                f"the gradients of {self._skipped} steps in a row were not finite ({error}); look "
                f"at the loss, at the rewards, at --learning_rate, and at `agentrl show "
                f"{self._run} --failed`"
            )
            raise known_to_all(failing) from None

    def _take_out(self, step: int, faults: Mapping[str, str]) -> None:
        if faults:
            self._quarantine(step, {row: f"{faults[row]} (step {step})" for row in sorted(faults)})
