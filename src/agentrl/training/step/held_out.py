"""What the weights make of rows that are not trained: their loss and, of pairs, their order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.step.learner import Learner
from agentrl.training.step.statistics import PreferenceStatistics, StepStatistics


@dataclass(frozen=True)
class HeldOut:
    """Means over all rows. `rewards`, `logps`: see `PreferenceStatistics`; empty without pairs."""

    loss: float  # as that of a step: a token's, in nats, or a pair's
    rewards: Mapping[str, float]
    logps: Mapping[str, float]


def held_out(learner: Learner, parts: Iterable[Sequence[Sequence[TrainingSequence]]]) -> HeldOut:
    """Look at rows with the present weights. Collective; all ranks get the same.

    `parts`: this rank's rows, each as its sequences, in parts of which one after the other is held
    in memory; all ranks have equally many parts.
    """
    looked = [learner.look(rows) for rows in parts]
    pairs = [part for part in looked if isinstance(part, PreferenceStatistics)]
    weights = [_weight(part) for part in looked]
    return HeldOut(
        loss=_mean([{"loss": part.loss} for part in looked], weights)["loss"],
        rewards=_mean([part.rewards for part in pairs], weights),
        logps=_mean([part.logps for part in pairs], weights),
    )


def _weight(part: StepStatistics) -> int:
    """How many of what the loss is a mean of are in a part."""
    return part.n_pairs if isinstance(part, PreferenceStatistics) else part.n_train_tokens


def _mean(parts: Sequence[Mapping[str, float]], weights: Sequence[int]) -> dict[str, float]:
    names = parts[0] if parts else ()
    return {
        name: sum(part[name] * weight for part, weight in zip(parts, weights, strict=True))
        / sum(weights)
        for name in names
    }
