"""All groups of flags as one value."""

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.configs.flag import ConfigError, comma_separated, flag
from agentrl.configs.sampling import (
    AgentConfig,
    ContextConfig,
    DataConfig,
    RewardConfig,
    SamplingConfig,
    ServiceConfig,
)
from agentrl.configs.training import (
    CheckpointConfig,
    CriticConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ReservedConfig,
)

TRACKERS = ("none", "tensorboard", "swanlab")


@dataclass(frozen=True)
class RunConfig:
    """The run and where it lives."""

    run_name: str = flag("run", "name of the run: its database, its folders, its logs", kind="NAME")
    output_dir: str | None = flag(
        None, "folder for checkpoints, weights and reports", unset="output/RUN", kind="DIR"
    )
    db_connection_string: str | None = flag(
        None,
        "mongodb:// URL of the run's MongoDB",
        unset="a launch starts one in the output folder",
        kind="URL",
    )
    report_to: str = flag("none", "tracker beside the JSONL metrics", choices=TRACKERS)
    change_data: bool = flag(
        False, "go on with another task file, model or world than the run began with"
    )
    seed: int = flag(42, "seed of data order and sampling")
    logging_steps: int = flag(1, "write metrics every so many steps", least=1)


@dataclass(frozen=True)
class Config:
    """All groups of one run, with their titles for people."""

    run: RunConfig = field(metadata={"title": "The run"})
    model: ModelConfig = field(metadata={"title": "Model"})
    data: DataConfig = field(metadata={"title": "Tasks"})
    sampling: SamplingConfig = field(metadata={"title": "Sampling"})
    services: ServiceConfig = field(metadata={"title": "Inference services"})
    agent: AgentConfig = field(metadata={"title": "Agents and their tools"})
    context: ContextConfig = field(metadata={"title": "Long and repetitive conversations"})
    reward: RewardConfig = field(metadata={"title": "From scores to advantages"})
    lora: LoraConfig = field(metadata={"title": "LoRA"})
    loss: LossConfig = field(metadata={"title": "Loss"})
    critic: CriticConfig = field(metadata={"title": "Critic of --loss_calculator PPO"})
    optimizer: OptimizerConfig = field(metadata={"title": "Optimizer and length of the run"})
    parallel: ParallelConfig = field(metadata={"title": "Processes and memory"})
    checkpoint: CheckpointConfig = field(metadata={"title": "Checkpoints"})
    reserved: ReservedConfig = field(
        metadata={"title": "Taken for scripts that give them, without a choice yet"}
    )

    @property
    def output(self) -> Path:
        """The run's folder."""
        return Path(self.run.output_dir or f"output/{self.run.run_name}")

    @property
    def sampling_params(self) -> dict[str, float]:
        """`--preferred_sampling_params` and the penalties, by the inference API's names."""
        given = json.loads(self.sampling.preferred_sampling_params)
        penalties = {
            "presence_penalty": self.sampling.presence_penalty,
            "frequency_penalty": self.sampling.frequency_penalty,
        }
        return {"temperature": 1.0, **{k: v for k, v in penalties.items() if v}, **given}

    @property
    def chat_template_options(self) -> dict[str, Any]:
        """`--chat_template_kwargs`."""
        return dict(json.loads(self.model.chat_template_kwargs))

    @property
    def inference_urls(self) -> list[str]:
        """The services given by URL."""
        return [url.rstrip("/") for url in comma_separated(self.sampling.inference_urls)]

    @property
    def temperature(self) -> float:
        """Of the sampling, and so of the trainer's logprobs."""
        return float(self.sampling_params["temperature"])

    @property
    def staleness_bound(self) -> int:
        """How many versions samplers may run ahead, and a trained token may be old."""
        return 0 if self.sampling.sync_sampling else self.sampling.max_staleness

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one forward pass."""
        return self.parallel.micro_batch_tokens or self.sampling.max_tokens


def check_tracker(report_to: str) -> None:
    """Raises `ConfigError` if the package of the tracker is not installed."""
    if report_to != "none" and importlib.util.find_spec(report_to) is None:
        raise ConfigError(
            f"--report_to {report_to}: the package {report_to} is not installed: "
            f"pip install {report_to}, or leave the flag out"
        )
