"""`Config`: all groups of flags of a run."""

import json
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from agentrl.configs.flag import ConfigError, FlagClass, comma_separated, flag, group
from agentrl.configs.sampling import (
    AgentConfig,
    ContextConfig,
    DataConfig,
    RewardConfig,
    SamplingConfig,
    ServiceConfig,
)
from agentrl.configs.text_checks import check_otlp_endpoint, check_run_name
from agentrl.configs.trackers import TRACKERS
from agentrl.configs.training import (
    CheckpointConfig,
    ComputeConfig,
    CriticConfig,
    LearnerConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ReservedConfig,
)

_TRACES = "opentelemetry-exporter-otlp-proto-http"
NO_BOUND = 2**31 - 1  # optimizer steps that no run takes


@dataclass(frozen=True)
class RunConfig:
    """The run's name, folder, database and logging."""

    run_name: str = flag(
        "run",
        "name of the run, of its database and of its folders, of 1 to 38 characters",
        kind="NAME",
        check=check_run_name,
    )
    output_dir: str | None = flag(
        None, "folder for checkpoints, weights and reports", unset="output/RUN", kind="DIR"
    )
    db_connection_string: str | None = flag(
        None,
        "mongodb:// URL of the run's MongoDB",
        unset="a launch starts one in the output folder",
        kind="URL",
    )
    report_to: str = flag(
        "none",
        "trackers that metrics and the best and worst rollouts go to, separated by commas; all "
        "means those that are installed",
        choices=("none", "all", *TRACKERS),
        kind="LIST",
    )
    otlp_endpoint: str | None = flag(
        None,
        "URL of an OTLP/HTTP receiver, which gets each trajectory as an OpenTelemetry trace, with "
        "the headers of the environment variable OTEL_EXPORTER_OTLP_HEADERS",
        unset="no traces",
        kind="URL",
        check=check_otlp_endpoint,
    )
    trace_rate: float = flag(
        1.0, "share of the trajectories that are traced, chosen by their ids", above=0, most=1
    )
    trace_failed_only: bool = flag(
        False, "whether only trajectories that failed or could not be scored are traced"
    )
    change_data: bool = flag(
        False,
        "whether the run may be resumed with another task file, model or tools than it began with",
    )
    seed: int = flag(42, "seed of the order of tasks and of sampling", belongs=FlagClass.SAMPLING)
    logging_steps: int = flag(
        1,
        "number of optimizer steps from one line of metrics to the next",
        least=1,
        belongs=FlagClass.TRAINING,
    )
    metrics_port: int | None = flag(
        None,
        "first TCP port at which the processes of this launch answer Prometheus at /metrics; each "
        "takes the next free one and enters it in output/RUN.metrics_targets.json (0: any free "
        "ones)",
        unset="no metrics are served",
        least=0,
        most=65535,
    )
    metrics_host: str = flag(
        "127.0.0.1",
        "address on which --metrics_port is opened; others than loopback show the metrics to "
        "whoever reaches them",
    )
    view: bool = flag(
        True, "whether a launch prints the address of pages about the run, and serves them"
    )
    store_trainer_logprobs: bool = flag(
        True,
        "whether each step stores the trainer's logprobs of its trained tokens in their rows, "
        "beside the sampler's",
        belongs=FlagClass.TRAINING,
    )


@dataclass(frozen=True)
class Config:
    """All groups of flags, each with its title and the default class of its flags."""

    run: RunConfig = field(metadata=group("The run", FlagClass.OWN))
    model: ModelConfig = field(metadata=group("Model", FlagClass.TRAINING))
    data: DataConfig = field(metadata=group("Tasks", FlagClass.TRAINING))
    sampling: SamplingConfig = field(metadata=group("Sampling", FlagClass.SAMPLING))
    services: ServiceConfig = field(metadata=group("Inference services", FlagClass.TRAINING))
    agent: AgentConfig = field(metadata=group("Agents and their tools", FlagClass.SAMPLING))
    context: ContextConfig = field(
        metadata=group("Long and repetitive conversations", FlagClass.SAMPLING)
    )
    reward: RewardConfig = field(metadata=group("From scores to advantages", FlagClass.SAMPLING))
    lora: LoraConfig = field(metadata=group("LoRA", FlagClass.FIXED))
    loss: LossConfig = field(metadata=group("Loss", FlagClass.TRAINING))
    critic: CriticConfig = field(
        metadata=group("Critic of --loss_calculator PPO", FlagClass.TRAINING)
    )
    optimizer: OptimizerConfig = field(
        metadata=group("Optimizer and length of the run", FlagClass.TRAINING)
    )
    compute: ComputeConfig = field(
        metadata=group("Precision, micro-batches and memory", FlagClass.TRAINING)
    )
    parallel: ParallelConfig = field(metadata=group("Processes", FlagClass.TRAINING))
    checkpoint: CheckpointConfig = field(metadata=group("Checkpoints", FlagClass.TRAINING))
    reserved: ReservedConfig = field(
        metadata=group("Taken for scripts that give them, without a choice yet", FlagClass.FIXED)
    )

    @property
    def output(self) -> Path:
        """The run's folder."""
        return Path(self.run.output_dir or f"output/{self.run.run_name}")

    @property
    def sampling_params(self) -> dict[str, float]:
        """`--preferred_sampling_params` and the penalties, by their names in the inference API."""
        given = json.loads(self.sampling.preferred_sampling_params)
        penalties = {
            "presence_penalty": self.sampling.presence_penalty,
            "frequency_penalty": self.sampling.frequency_penalty,
        }
        return {"temperature": 1.0, **{k: v for k, v in penalties.items() if v}, **given}

    @property
    def chat_template_options(self) -> dict[str, Any]:
        """`--chat_template_kwargs`, parsed."""
        return dict(json.loads(self.model.chat_template_kwargs))

    @property
    def inference_urls(self) -> list[str]:
        """The URLs of `--inference_urls`, without a slash at the end."""
        return [url.rstrip("/") for url in comma_separated(self.sampling.inference_urls)]

    @property
    def temperature(self) -> float:
        """Temperature of sampling. The trainer's logprobs use it too."""
        return float(self.sampling_params["temperature"])

    @property
    def staleness_bound(self) -> int:
        """Largest staleness of a trained token in optimizer steps; 0 with `--sync_sampling`.

        There is no bound where nothing is sampled: no fresher rows would follow the evicted ones.
        """
        if not self.sampling.enable_sampling:
            return NO_BOUND
        return 0 if self.sampling.sync_sampling else self.sampling.max_staleness

    @property
    def steps_ahead(self) -> int:
        """The number of steps by which samplers may run ahead of the trainer.

        The services' weights may be `--publish_steps` - 1 steps old when a row is begun, which
        counts to its staleness.
        """
        return max(0, self.staleness_bound - (self.services.publish_steps - 1))

    @property
    def group_size(self) -> int:
        """The most rollouts of a training group: `--num_generations`, and their forks."""
        sampling = self.sampling
        return sampling.num_generations * (1 + sampling.fork_turns * sampling.forks)

    @property
    def micro_batch_tokens(self) -> int:
        """Largest number of tokens of one forward pass."""
        return self.compute.micro_batch_tokens or self.sampling.max_tokens

    @property
    def learner(self) -> LearnerConfig:
        """The groups that a `Learner` reads, with the numbers that follow from other groups."""
        summed = self.loss.skip_length_normalization
        length = self.loss.normalization_length or (1 if summed else self.sampling.max_new_tokens)
        return LearnerConfig(
            compute=replace(self.compute, micro_batch_tokens=self.micro_batch_tokens),
            loss=replace(self.loss, normalization_length=length),
            optimizer=self.optimizer,
            critic=self.critic,
            model=self.model,
            longest_row=self.sampling.max_tokens,
        )


def check_traces(run: RunConfig) -> None:
    """Raise `ConfigError` if traces are asked for and their package is not installed."""
    if run.otlp_endpoint is None:
        return
    try:
        version(_TRACES)
    except PackageNotFoundError:
        raise ConfigError(
            f"--otlp_endpoint {run.otlp_endpoint}: the package {_TRACES} is not installed: "
            "pip install -r requirements-traces.txt, or leave the flag out"
        ) from None
