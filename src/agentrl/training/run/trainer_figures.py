"""The figures of a trainer, which rank 0 serves: totals since its start, and its last step."""

import time
from collections import Counter as Counts
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.registry import Collector

from agentrl.configs import Config
from agentrl.metrics.exposure import exposed
from agentrl.metrics.figure import Counter, Gauge, Histogram
from agentrl.training.background import BackgroundLoop
from agentrl.training.run.metrics import StepMetrics, StepTimes
from agentrl.training.step.statistics import STALENESS_BUCKETS

STEP = Gauge("agentrl_step", "Optimizer steps of the run's weights.")
MAX_STEPS = Gauge("agentrl_max_steps", "Optimizer steps at which the run ends.")
VERSION = Gauge("agentrl_policy_version", "The newest published policy version.")
LAST_STEP = Gauge(
    "agentrl_last_step_timestamp_seconds", "When the last step ended, or the trainer began."
)
STEPS = Counter("agentrl_steps_total", "Steps that changed the weights.")
SKIPPED = Counter(
    "agentrl_skipped_steps_total", "Steps that left the weights, as no gradient was finite."
)
PHASES = Counter(
    "agentrl_phase_seconds_total",
    "Time by phase of a step: wait for rows, train, publish, save, and other.",
    ("phase",),
)
TRAINED_TOKENS = Counter("agentrl_trained_tokens_total", "Trained tokens, prompts excluded.")
TRAINED_ROWS = Counter("agentrl_trained_rows_total", "Trained rows.")
STALENESS = Histogram(
    "agentrl_trained_token_staleness",
    "Staleness of trained tokens, in optimizer steps.",
    tuple(float(bound) for bound in range(STALENESS_BUCKETS - 1)),
)
# Of the last step: the field of `StepMetrics`, and its figure.
OF_STEP = {
    "reward_mean": Gauge("agentrl_reward", "Mean reward of the last step's rows."),
    "loss": Gauge("agentrl_loss", "Loss of the last step."),
    "grad_norm": Gauge("agentrl_gradient_norm", "Norm of the last gradient, before clipping."),
    "learning_rate": Gauge("agentrl_learning_rate", "Learning rate of the last step."),
    "mismatch_kl": Gauge(
        "agentrl_mismatch_kl", "KL between sampler and trainer over the last step's tokens."
    ),
    "ratio_max": Gauge("agentrl_ratio_max", "Largest ratio of trainer to sampler."),
    "effective_sample_size": Gauge(
        "agentrl_effective_sample_size", "Effective share of the last step's tokens: 1 on policy."
    ),
    "clip_fraction": Gauge("agentrl_clip_fraction", "Share of the last step's tokens clipped."),
    "left_out_fraction": Gauge(
        "agentrl_left_out_fraction", "Share of the last step's tokens left out for their ratio."
    ),
    "entropy": Gauge("agentrl_entropy", "Entropy of the policy, with --log_entropy."),
    "reference_kl": Gauge("agentrl_reference_kl", "KL to the reference, with --beta."),
    "stall_seconds": Gauge(
        "agentrl_service_stall_seconds", "Longest pause of a service for the last publication."
    ),
    "plan_balance": Gauge(
        "agentrl_plan_balance", "Operations of the dearest rank over the mean of all ranks."
    ),
}


def expose(
    config: Config, max_steps: int, background: BackgroundLoop, stack: ExitStack
) -> "TrainerFigures":
    """Serve the figures of a trainer until `stack` is left, and return them."""
    figures = TrainerFigures(max_steps)
    serving = exposed(config, "trainer", [figures])
    background.run(serving.__aenter__())
    stack.callback(lambda: background.submit(serving.__aexit__(None, None, None)).result())
    return figures


@dataclass(eq=False)
class TrainerFigures(Collector):
    """The figures of one trainer. Written by the training thread, read by another one."""

    max_steps: int
    step: int = 0  # where the trainer begins, or is by now
    version: int = -1  # the newest published one
    _last: StepMetrics | None = None
    _ended: float = field(default_factory=time.time)
    _steps: int = 0
    _skipped: int = 0
    _tokens: int = 0
    _rows: int = 0
    _phases: Counts[str] = field(default_factory=Counts)
    _staleness: list[int] = field(default_factory=lambda: [0] * STALENESS_BUCKETS)
    _staleness_sum: float = 0.0

    def skipped(self, step: int, version: int, times: StepTimes) -> None:
        """A step has left the weights as they were. `version`: the newest published one."""
        self._skipped += 1
        self._count(step, version, times)

    def trained(self, line: StepMetrics, version: int) -> None:
        """A step has changed the weights. `version`: the newest published one."""
        self._last = line
        self._steps += 1
        self._tokens += line.n_train_tokens
        self._rows += line.n_rows
        self._staleness = [
            before + came
            for before, came in zip(self._staleness, line.staleness_histogram, strict=True)
        ]
        self._staleness_sum += line.staleness_mean * line.n_train_tokens
        self._count(line.step, version, line)

    def _count(self, step: int, version: int, times: StepTimes) -> None:
        self.step, self.version = step, version
        phases = {
            "wait": times.wait_seconds,
            "train": times.train_seconds,
            "publish": times.publish_seconds,
            "save": times.save_seconds,
        }
        phases["other"] = max(0.0, times.step_seconds - sum(phases.values()))
        self._phases = self._phases + Counts(phases)  # a new one: another thread reads the old
        self._ended = time.time()

    def collect(self) -> Iterator[Metric]:
        """All figures with their present values."""
        yield STEP.of(self.step)
        yield MAX_STEPS.of(self.max_steps)
        yield VERSION.of(self.version if self.version >= 0 else None)
        yield LAST_STEP.of(self._ended)
        yield STEPS.of(self._steps)
        yield SKIPPED.of(self._skipped)
        yield PHASES.by(self._phases)
        yield TRAINED_TOKENS.of(self._tokens)
        yield TRAINED_ROWS.of(self._rows)
        yield STALENESS.of(self._staleness, self._staleness_sum)
        last = self._last
        for name, figure in OF_STEP.items():
            yield figure.of(None if last is None else getattr(last, name))
