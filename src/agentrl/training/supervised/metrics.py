"""One line of `metrics.jsonl` of supervised training, and what is logged of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from agentrl.training.step.held_out import HeldOut
from agentrl.training.step.statistics import PreferenceStatistics, StepStatistics


@dataclass(frozen=True)
class StepSize:
    """The rows and the durations of a step."""

    epoch: float  # passes over the rows so far
    n_rows: int
    n_tokens: int  # of the step's rows; a shared prefix counts once
    n_train_tokens: int
    step_seconds: float
    train_seconds: float  # of it: forward, backward and update
    tokens_per_second: float  # n_tokens over train_seconds, on all processes together


@dataclass(frozen=True, kw_only=True)
class SupervisedMetrics(StepSize):
    """A step on demonstrations."""

    step: int
    time: float  # seconds since 1970, when the step ended
    loss: float  # cross entropy of the step's trained tokens, nats a token; of pairs, their loss
    eval_loss: float | None  # of the held-out rows, after the step; None where it is not taken
    learning_rate: float
    grad_norm: float  # before clipping


@dataclass(frozen=True, kw_only=True)
class PreferenceMetrics(SupervisedMetrics):
    """A step on pairs: also `PreferenceStatistics`, before the step. Trackers name them as TRL."""

    rewards: Mapping[str, float]
    logps: Mapping[str, float]
    eval_rewards: Mapping[str, float] | None  # of the held-out pairs, after the step
    eval_logps: Mapping[str, float] | None


def metrics_line(
    step: int, time: float, statistics: StepStatistics, looked: HeldOut | None, size: StepSize
) -> SupervisedMetrics:
    """The line of a step. `looked`: the held-out rows after it; None where they are not."""
    line = SupervisedMetrics(
        step=step,
        time=time,
        loss=statistics.loss,
        eval_loss=None if looked is None else looked.loss,
        learning_rate=statistics.learning_rate,
        grad_norm=statistics.grad_norm,
        **asdict(size),
    )
    if not isinstance(statistics, PreferenceStatistics):
        return line
    return PreferenceMetrics(
        **vars(line),
        rewards=statistics.rewards,
        logps=statistics.logps,
        eval_rewards=None if looked is None else looked.rewards,
        eval_logps=None if looked is None else looked.logps,
    )


def sentence(line: SupervisedMetrics, looked: HeldOut | None) -> str:
    """What is logged of a step."""
    parts = [f"loss {line.loss:.4f}"]
    if isinstance(line, PreferenceMetrics):
        parts.append(_order(line.rewards))
    if looked is not None:
        parts.append(held_out_sentence(looked))
    parts += [f"gradient norm {line.grad_norm:.3g}", f"{line.tokens_per_second:.0f} tokens/s"]
    return ", ".join(parts)


def held_out_sentence(looked: HeldOut) -> str:
    """What is logged of held-out rows."""
    text = f"held-out loss {looked.loss:.4f}"
    return f"{text}, held-out {_order(looked.rewards)}" if looked.rewards else text


def _order(rewards: Mapping[str, float]) -> str:
    return f"accuracy {rewards['accuracies']:.2f}, margin {rewards['margins']:.3g}"
