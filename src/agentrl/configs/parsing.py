"""All groups of flags together, read from a command line and checked."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from transformers.hf_argparser import HfArgumentParser

from agentrl.configs.flag import ConfigError, comma_separated, flag, one_of, one_of_or_function
from agentrl.configs.loss_checks import validate_loss
from agentrl.configs.losses import ADVANTAGES, loss_defaults
from agentrl.configs.sampling import (
    NEW_CONTEXTS,
    TOOL_CALL_PARSERS,
    WEIGHT_UPDATE_PAUSES,
    WEIGHT_UPDATES,
    AgentConfig,
    ContextConfig,
    DataConfig,
    RewardConfig,
    SamplingConfig,
    ServiceConfig,
)
from agentrl.configs.training import (
    CONTEXT_MODES,
    SCHEDULES,
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
SAMPLING_PARAMS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,37}")  # MongoDB: 63 bytes for a database's name


# The least value of flags that are counts, sizes or rates.
_LEAST: dict[str, float] = {
    "num_generations": 1, "max_concurrent_samples_per_process": 1, "target_concurrency": 0,
    "drain_seconds": 0, "max_turns": 1, "max_tokens": 2, "max_new_tokens": 1,
    "max_prompt_tokens": 1, "max_staleness": 0, "max_attempts": 1, "lease_seconds": 1,
    "record_timeout": 0.1, "request_timeout": 0.1, "startup_timeout": 0.1, "tool_timeout": 0.1,
    "mcp_sessions": 1, "max_tool_result_chars": 1,
    "repetition_early_stop_times": -1, "browse_min_chars": 0, "browse_max_chars": 1,
    "min_turns": 0, "reserve_context_error_count": 0,
    "eval_steps": 0, "eval_attempts": 1,
    "lora_rank": 0, "lora_alpha": 0,
    "epsilon": 0, "epsilon_higher": 0, "beta1": 0, "beta2": 0, "dual_clip": 1,
    "importance_weight_cap_ratio": 0, "rollout_rs_threshold": 1, "rollout_rs_threshold_lower": 0,
    "out_of_date_decay": 0, "beta": 0, "entropy_coef": 0, "clip_cov_ratio": 0, "kl_cov_ratio": 0,
    "ppo_kl_coef": 0, "sapo_temperature_pos": 0.001, "sapo_temperature_neg": 0.001,
    "critic_learning_rate": 0, "critic_updates": 1, "critic_warmup_steps": 0, "value_clip": 0,
    "learning_rate": 0, "max_grad_norm": 0,
    "warmup_steps": 0, "max_steps": -1, "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1, "max_trained_count": 1, "retrained_interval": 1,
    "micro_batch_tokens": 1, "pad_to_multiple_of": 1, "loss_seq_chunk_size": 1,
    "save_steps": 1, "save_total_limit": 1, "logging_steps": 1,
    "tp_size": 1, "cp_size": 1, "ep_size": 1, "dp_replicate_size": 1, "pp_size": 1,
    "inf_tp_size": 1, "inf_ep_size": 1,
}  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """The run and where it lives."""

    run_name: str = flag("run", "name of the run: its database, its folders, its logs")
    output_dir: str | None = flag(
        None, "folder for checkpoints, weights and reports (default output/RUN)"
    )
    db_connection_string: str | None = flag(
        None, "mongodb:// URL of the run's MongoDB (default: one is started in the output folder)"
    )
    report_to: str = flag("none", "tracker beside the JSONL metrics: none, tensorboard or swanlab")
    change_data: bool = flag(
        False, "go on with another task file, model or world than the run began with"
    )
    seed: int = flag(42, "seed of data order and sampling")
    logging_steps: int = flag(1, "write metrics every so many steps")


@dataclass(frozen=True)
class Config:
    """All groups of one run."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    sampling: SamplingConfig
    services: ServiceConfig
    agent: AgentConfig
    context: ContextConfig
    reward: RewardConfig
    lora: LoraConfig
    loss: LossConfig
    critic: CriticConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    checkpoint: CheckpointConfig
    reserved: ReservedConfig

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


class _Parser(HfArgumentParser):
    """argparse that raises `ConfigError` instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        # "argument --max_turns/--max-turns: ..." names all spellings of a flag: the first will do.
        raise ConfigError(re.sub(r"^argument (--\w+)[^:]*:", r"\1:", message))


_GROUPS = tuple(fields(Config))


def config_parser(prog: str, description: str) -> HfArgumentParser:
    """The parser of all flags, grouped in its help."""
    return _Parser(
        [group.type for group in _GROUPS],  # type: ignore[misc]
        prog=prog,
        description=description,
        allow_abbrev=False,
    )


def parse_config(
    argv: Sequence[str], prog: str = "agentrl", description: str = "One run of AgentRL."
) -> Config:
    """The configuration that the flags in `argv` give.

    Raises `ConfigError`: an unknown flag, a value of the wrong type or out of its range.
    """
    parser = config_parser(prog, description)
    *groups, unknown = parser.parse_args_into_dataclasses(
        args=list(argv), return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        raise ConfigError(f"unknown flag {unknown[0]}: `{prog} --help` lists them all")
    return _checked(Config(*groups))


def config_of(values: Mapping[str, Any]) -> Config:
    """The configuration with these values of flags, and defaults for the others.

    Raises `ConfigError` for a value out of its range.
    """
    parser = config_parser("agentrl", "")
    return _checked(Config(*parser.parse_dict(dict(values))))


def _checked(config: Config) -> Config:
    config = _with_loss_defaults(config)
    _validate(config)
    return config


def _with_loss_defaults(config: Config) -> Config:
    """With the advantage that the loss's paper has, if none is given: samplers know no loss."""
    if config.reward.advantage is not None:
        return config
    advantage = loss_defaults(config.loss.loss_calculator).advantage
    return replace(config, reward=replace(config.reward, advantage=advantage))


def _at_least(flag: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise ConfigError(f"--{flag} {value}: must be at least {least:g}")


def _validate(config: Config) -> None:
    """Refuse values that would fail later, or quietly mean something else."""
    validate_loss(config.loss)
    one_of_or_function("advantage", config.reward.estimator, ADVANTAGES)
    if config.agent.tool_call_parser is not None:
        one_of("tool_call_parser", config.agent.tool_call_parser, TOOL_CALL_PARSERS)
    one_of("new_context", config.context.new_context, NEW_CONTEXTS)
    longest = config.sampling.max_prompt_tokens
    if config.context.new_context != "disabled" and not (
        longest is not None and longest < config.sampling.max_tokens
    ):
        raise ConfigError(
            f"--new_context {config.context.new_context}: needs --max_prompt_tokens, below "
            f"--max_tokens ({config.sampling.max_tokens}), which ends a record"
        )
    one_of("lr_scheduler_type", config.optimizer.lr_scheduler_type, SCHEDULES)
    one_of("cp_mode", config.parallel.cp_mode, CONTEXT_MODES)
    one_of("report_to", config.run.report_to, TRACKERS)
    for url in config.inference_urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--inference_urls {url}: must begin with http:// or https://")
    one_of("weight_update", config.services.weight_update, WEIGHT_UPDATES)
    one_of("weight_update_pause", config.services.weight_update_pause, WEIGHT_UPDATE_PAUSES)
    if not RUN_NAME.fullmatch(config.run.run_name):
        raise ConfigError(
            f"--run_name {config.run.run_name!r}: must be 1 to 38 letters, digits, - or _, "
            "because it names a database and folders"
        )
    for group in _GROUPS:
        values = getattr(config, group.name)
        for name, least in _LEAST.items():
            if name in type(values).__dataclass_fields__:
                _at_least(name, getattr(values, name), least)
    if config.parallel.pp_size > 1:
        raise ConfigError(
            f"--pp_size {config.parallel.pp_size}: there is no pipeline parallelism, because a "
            "step's trees have no common shape to send between stages; use --dp_replicate_size, "
            "--tp_size, --cp_size or --ep_size"
        )
    if config.lora.lora_rank and (config.parallel.tp_size > 1 or config.parallel.ep_size > 1):
        raise ConfigError(
            f"--lora_rank {config.lora.lora_rank}: an adapter cannot be split over --tp_size or "
            "--ep_size, because the model's plan for them does not know it; shard over data or use "
            "--cp_size"
        )
    for reserved in fields(ReservedConfig):
        value = getattr(config.reserved, reserved.name)
        if value != reserved.default:
            raise ConfigError(
                f"--{reserved.name} {value}: this version has only {reserved.default}; "
                "leave the flag out"
            )
    _validate_sampling_params(config.sampling.preferred_sampling_params)
    _json_object("chat_template_kwargs", config.model.chat_template_kwargs)
    ratio = config.services.inf_mem_ratio
    if ratio is not None and not 0 < ratio < 1:
        raise ConfigError(f"--inf_mem_ratio {ratio:g}: must lie between 0 and 1")
    if config.services.inf_share_gpus and not config.sampling.sync_sampling:
        raise ConfigError(
            "--inf_share_gpus: needs --sync_sampling, because services whose memory is given back "
            "cannot sample while the trainer computes"
        )
    for name in ("gae_gamma", "gae_lambda"):
        factor = getattr(config.critic, name)
        if not 0 <= factor <= 1:
            raise ConfigError(f"--{name} {factor:g}: must lie between 0 and 1")
    compares = config.reward.estimator != "score" and config.loss.loss_calculator != "CrossEntropy"
    if config.sampling.num_generations < 2 and compares:
        raise ConfigError(
            f"--num_generations {config.sampling.num_generations}: an advantage compares attempts "
            "at one task, so there must be at least 2"
        )


def _json_object(name: str, text: str) -> dict[str, Any]:
    """The JSON object that is a flag's value."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--{name} {text}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--{name} {text}: not a JSON object")
    return value


def _validate_sampling_params(text: str) -> None:
    flag = f"--preferred_sampling_params {text}"
    params = _json_object("preferred_sampling_params", text)
    for name, value in params.items():
        if name not in SAMPLING_PARAMS:
            raise ConfigError(f"{flag}: {name} is not known; known: {', '.join(SAMPLING_PARAMS)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{flag}: {name} is not a number")
    if params.get("temperature", 1.0) <= 0:
        raise ConfigError(
            f"{flag}: temperature must be above 0, because attempts at one task must differ"
        )
