"""Which figures of a run's steps are drawn together, in `training.png` and on the page of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.launcher.progress import Metrics


@dataclass(frozen=True)
class Panel:
    """A panel of up to two figures of `metrics.jsonl`, each with its name in the legend."""

    title: str
    figures: Sequence[tuple[str, str]]


PANELS = (
    Panel("loss", [("loss", "")]),
    Panel("gradient norm", [("grad_norm", "")]),
    Panel("entropy", [("entropy", "exact"), ("negative_logprob", "of sampled tokens")]),
    Panel("KL to the reference", [("reference_kl", "")]),
    Panel("KL of sampler and trainer", [("mismatch_kl", "")]),
    Panel("effective sample size", [("effective_sample_size", "")]),
    Panel("clipped tokens", [("clip_fraction_high", "high"), ("clip_fraction_low", "low")]),
    Panel("staleness", [("staleness_max", "largest"), ("staleness_mean", "mean")]),
    Panel("explained variance of the critic", [("explained_variance", "")]),
    Panel("seconds of a step", [("step_seconds", "all"), ("train_seconds", "training")]),
)


def values_of(metrics: Sequence[Metrics], name: str) -> list[tuple[int, float]]:
    """(step, value) of a figure, for the lines that have it."""
    return [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
