"""Every flag of a run, in grouped dataclasses that are flat on the command line.

Trainer, samplers and evaluation of one run read the same flags, so that one line starts any of
them on any machine. A group is handed to the code that needs it; nothing reads flags by name.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from transformers.hf_argparser import HfArgumentParser

LOSSES = ("GRPO", "MINIRL", "CrossEntropy")
ADVANTAGES = ("mean_std", "mean", "leave_one_out")
TOOL_CALL_PARSERS = (
    "qwen25", "qwen", "qwen3_coder", "mistral", "llama3", "deepseekv3", "pythonic", "kimi_k2",
    "glm45", "gpt-oss", "minicpm",
)  # fmt: skip
NEW_CONTEXTS = ("disabled", "discard_all_tools", "discard_all")
WEIGHT_UPDATES = ("disk", "distributed", "tensor")
WEIGHT_UPDATE_PAUSES = ("retract", "in_place")
TRACKERS = ("none", "tensorboard", "swanlab")
SAMPLING_PARAMS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,37}")  # MongoDB: 63 bytes for a database's name
SCHEDULES = (
    "linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt", "polynomial",
)  # fmt: skip


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
    "epsilon": 0, "epsilon_higher": 0, "learning_rate": 0, "max_grad_norm": 0,
    "warmup_steps": 0, "max_steps": -1, "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1, "max_trained_count": 1, "retrained_interval": 1,
    "micro_batch_tokens": 1, "pad_to_multiple_of": 1, "loss_seq_chunk_size": 1,
    "save_steps": 1, "save_total_limit": 1, "logging_steps": 1,
    "inf_tp_size": 1, "inf_ep_size": 1,
}  # fmt: skip


class ConfigError(ValueError):
    """A flag has a value that it cannot have. The message is one sentence for the user."""


def comma_separated(value: str | None) -> list[str]:
    """The parts of a flag that takes several."""
    return [part.strip() for part in (value or "").split(",") if part.strip()]


def _flag(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field that is a flag."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class RunConfig:
    """The run and where it lives."""

    run_name: str = _flag("run", "name of the run: its database, its folders, its logs")
    output_dir: str | None = _flag(
        None, "folder for checkpoints, weights and reports (default output/RUN)"
    )
    db_connection_string: str | None = _flag(
        None, "mongodb:// URL of the run's MongoDB (default: one is started in the output folder)"
    )
    report_to: str = _flag("none", "tracker beside the JSONL metrics: none, tensorboard or swanlab")
    seed: int = _flag(42, "seed of data order and sampling")
    logging_steps: int = _flag(1, "write metrics every so many steps")


@dataclass(frozen=True)
class ModelConfig:
    """The policy."""

    model_name_or_path: str | None = _flag(None, "folder of the model to train")
    chat_template_kwargs: str = _flag(
        "{}", 'variables of the chat template, as JSON: {"enable_thinking": false}'
    )
    attention_implementation: str = _flag("sdpa", "attention of the trainer's model")
    bf16: bool = _flag(False, "compute in bfloat16, with float32 master weights and reduction")
    gradient_checkpointing: bool = _flag(False, "recompute activations in the backward pass")


@dataclass(frozen=True)
class DataConfig:
    """Tasks."""

    train_file: str | None = _flag(None, "training tasks: JSONL, JSON or Parquet")
    eval_file: str | None = _flag(None, "held-out tasks: JSONL, JSON or Parquet")
    num_train_epochs: float = _flag(
        3.0, "passes over the training tasks, if --max_steps is not set"
    )
    eval_steps: int = _flag(0, "evaluate on the held-out tasks every so many steps (0: never)")
    eval_attempts: int = _flag(4, "attempts at each held-out task")


@dataclass(frozen=True)
class SamplingConfig:
    """How trajectories are sampled."""

    enable_sampling: bool = _flag(True, "sample; off: train on the rows that the database holds")
    sync_sampling: bool = _flag(
        False, "no overlap: sample for a step, train it, sample for the next"
    )
    max_staleness: int = _flag(
        2, "how many steps samplers may run ahead, and a trained token may be old"
    )
    num_generations: int = _flag(8, "attempts at each task, the group of its advantages")
    max_concurrent_samples_per_process: int = _flag(
        64, "trajectories one sampler runs at once, at the most"
    )
    target_concurrency: int = _flag(
        0,
        "trajectories of a sampler for each inference service to aim at: more while it is clear, "
        "fewer while it is busy (0: as many as the process may run)",
    )
    max_turns: int = _flag(200, "turns of a trajectory")
    max_tokens: int = _flag(65536, "tokens of a trajectory, all turns and tool results together")
    max_new_tokens: int = _flag(8192, "tokens of one turn")
    max_prompt_tokens: int | None = _flag(None, "longest prompt of a turn (default --max_tokens)")
    preferred_sampling_params: str = _flag(
        "{}", 'JSON of sampling parameters: {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0}'
    )
    presence_penalty: float = _flag(0.0, "presence penalty of the sampling")
    frequency_penalty: float = _flag(0.0, "frequency penalty of the sampling")
    resample_error_records: bool = _flag(True, "try a slot again whose record ended in an error")
    max_attempts: int = _flag(3, "attempts at a slot before it is given up as failed")
    lease_seconds: float = _flag(60.0, "a sampler or trainer silent for so long is taken for dead")
    drain_seconds: float = _flag(
        30.0, "after SIGTERM, seconds that a sampler takes to finish trajectories in progress"
    )
    record_timeout: float = _flag(1800.0, "seconds that one trajectory may take")
    request_timeout: float = _flag(
        600.0, "seconds that one request to an inference service may take"
    )
    startup_timeout: float = _flag(
        300.0, "seconds to wait for MongoDB, tools and inference at start"
    )
    inference_urls: str | None = _flag(
        None, "comma separated URLs of inference services, beside those registered in the database"
    )


@dataclass(frozen=True)
class ServiceConfig:
    """SGLang services that a launch starts (SGLANG_COMMAND); how any service gets new weights."""

    weight_update: str = _flag(
        "disk", f"how new weights come to the inference services: {', '.join(WEIGHT_UPDATES)}"
    )
    weight_update_pause: str = _flag(
        "retract",
        "what running requests do at an update: retract (their keys and values are recomputed "
        "under the new weights) or in_place (those of the old weights are kept)",
    )
    inf_tp_size: int = _flag(1, "GPUs of a service that share each layer")
    inf_ep_size: int = _flag(1, "GPUs of a service that share the experts")
    inf_mem_ratio: float | None = _flag(
        None, "share of a GPU's memory for a service's weights and cache (default: SGLang's choice)"
    )
    inf_share_gpus: bool = _flag(
        False, "services give their memory back while the trainer computes (with --sync_sampling)"
    )


@dataclass(frozen=True)
class AgentConfig:
    """Agents, their tools and the models that help."""

    agent_name: str = _flag("mcp", "agent of the tasks that name none: mcp, single_turn, math, ...")
    agent_module: str | None = _flag(None, "Python file that registers agents")
    mcp_manager_url: str | None = _flag(
        None,
        "tool servers: the URL of an MCP server, or of an aggregator if it ends in /mcpapi; "
        "several with commas between (NAME=URL names one); or a config file with `mcpServers`",
    )
    mcp_server_name: str | None = _flag(
        None,
        "comma separated names of the servers to use, of several (default: all); the name of a "
        "server given alone",
    )
    mcp_auth_token: str | None = _flag(None, "bearer token for servers given by URL")
    mcp_allow_tools: str | None = _flag(
        None,
        "comma separated patterns of the tools to offer, as tool or server.tool (default: all)",
    )
    mcp_block_tools: str | None = _flag(None, "comma separated patterns of tools not to offer")
    mcp_sessions: int = _flag(1, "sessions with each tool server that all trajectories share")
    tool_call_parser: str | None = _flag(
        None,
        f"how the model writes tool calls: {', '.join(TOOL_CALL_PARSERS)} (default: as its "
        "chat template does, or qwen25 if that writes none)",
    )
    tool_timeout: float = _flag(60.0, "seconds that one tool call may take")
    max_tool_result_chars: int = _flag(
        100_000, "characters of a tool's result that the model reads; the database keeps the whole"
    )
    agent_config_path: str | None = _flag(
        None, "YAML file with the models of browse and scorer agents"
    )
    system_prompt: str | None = _flag(None, "system message of every conversation")


@dataclass(frozen=True)
class ContextConfig:
    """What happens to a conversation that grows too long, or goes round in circles."""

    new_context: str = _flag(
        "disabled",
        f"when a prompt reaches --max_prompt_tokens: {', '.join(NEW_CONTEXTS)}",
    )
    repetition_early_stop_times: int = _flag(
        0, "end a trajectory after so many turns that repeat earlier ones (0 or -1: never)"
    )
    enable_repetition_compress: bool = _flag(
        False, "take a turn that repeats an earlier one out of the conversation, with its results"
    )
    browse_tools: str = _flag(
        "*", "tools whose long results browse_agent reads: names or patterns, comma separated"
    )
    browse_min_chars: int = _flag(8000, "characters from which on a tool result is long")
    browse_max_chars: int = _flag(
        200_000, "characters of a tool result that browse_agent is given: the rest is cut off"
    )


@dataclass(frozen=True)
class RewardConfig:
    """From scores to advantages."""

    advantage: str = _flag("mean_std", f"advantage of a group: {', '.join(ADVANTAGES)}")
    adv_scaling: float = _flag(1.0, "factor on every advantage")
    drop_zero_advantage: bool = _flag(True, "leave out records whose advantage is 0")
    minimal_advantage: float | None = _flag(
        None, "leave out records whose advantage is not greater than this"
    )
    balance_sample: bool = _flag(False, "train as many wrong records of a group as right ones")
    efficient_rewarding: bool = _flag(
        False, "rank the right records of a group by how little they needed"
    )
    min_turns: int = _flag(0, "leave out right records with no more turns than this")
    reserve_context_error_count: int | None = _flag(
        None, "of a group's records that ended at a limit, train only so many (default: all)"
    )
    scorer_module: str | None = _flag(None, "Python file that registers scorers")


@dataclass(frozen=True)
class LossConfig:
    """The loss."""

    loss_calculator: str = _flag(
        "GRPO", f"loss: {', '.join(LOSSES)}", aliases=["--loss_calculater"]
    )
    token_level_loss: bool = _flag(True, "average over tokens of the batch; off: over sequences")
    skip_length_normalization: bool = _flag(False, "sum over tokens, average over sequences only")
    epsilon: float = _flag(0.2, "clip range below 1 of the importance ratio")
    epsilon_higher: float | None = _flag(None, "clip range above 1 (default --epsilon)")
    strict_in_bound: bool = _flag(False, "leave tokens out whose ratio is out of the clip range")
    importance_weight_cap_ratio: float | None = _flag(
        None, "cap on the importance weight between trainer and sampler (default: none)"
    )
    out_of_date_decay: float | None = _flag(
        None, "factor on a token's advantage for each step that its policy version is old"
    )
    log_entropy: bool = _flag(False, "log the policy's entropy")


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer step, by the names of transformers.TrainingArguments."""

    learning_rate: float = _flag(1e-6, "peak learning rate")
    weight_decay: float = _flag(0.0, "AdamW weight decay")
    adam_beta1: float = _flag(0.9, "AdamW beta 1")
    adam_beta2: float = _flag(0.95, "AdamW beta 2")
    adam_epsilon: float = _flag(1e-8, "AdamW epsilon")
    max_grad_norm: float = _flag(1.0, "gradient norm to clip to")
    lr_scheduler_type: str = _flag("constant", f"learning rate schedule: {', '.join(SCHEDULES)}")
    warmup_steps: int = _flag(0, "steps of linear warm-up")
    max_steps: int = _flag(-1, "optimizer steps (-1: as --num_train_epochs gives)")
    per_device_train_batch_size: int = _flag(1, "rows of a step, per data-parallel rank and ...")
    gradient_accumulation_steps: int = _flag(1, "... times so many")
    max_trained_count: int = _flag(1, "how often a row is trained, unless it grows too old")
    retrained_interval: int = _flag(
        1, "least steps from one training of a row to the next, while there are other rows"
    )


@dataclass(frozen=True)
class ParallelConfig:
    """Devices and memory."""

    use_cpu: bool = _flag(False, "train on the CPU though there is a GPU")
    micro_batch_tokens: int | None = _flag(
        None, "tokens of one forward pass, padding included (default --max_tokens)"
    )
    pad_to_multiple_of: int = _flag(1, "pad micro-batches to a multiple of so many tokens")
    loss_seq_chunk_size: int = _flag(1024, "tokens whose logits exist at once")


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints."""

    save_steps: int = _flag(100, "save a checkpoint every so many steps, and at the end")
    save_total_limit: int | None = _flag(3, "how many checkpoints to keep")
    resume_from_checkpoint: str | None = _flag(
        None,
        "folder to resume from, or `true` for the run's last; `false` starts anew "
        "(default: the run's last, if there is one)",
    )


@dataclass(frozen=True)
class ReservedConfig:
    """Flags whose feature this version does not have: only the default is taken."""

    tp_size: int = _flag(1, "tensor parallelism (only 1 in this version)")
    cp_size: int = _flag(1, "context parallelism (only 1 in this version)")
    pp_size: int = _flag(1, "pipeline parallelism (only 1 in this version)")
    ep_size: int = _flag(1, "expert parallelism (only 1 in this version)")
    activation_offloading: bool = _flag(
        False, "activations to the CPU (only false in this version)"
    )
    dynamic_batching: bool = _flag(True, "fill micro-batches by tokens (only true in this version)")


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
    loss: LossConfig
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
    config = Config(*groups)
    _validate(config)
    return config


def _one_of(flag: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"--{flag} {value}: not known; known: {', '.join(known)}")


def _at_least(flag: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise ConfigError(f"--{flag} {value}: must be at least {least:g}")


def _validate(config: Config) -> None:
    """Refuse values that would fail later, or quietly mean something else."""
    _one_of("loss_calculator", config.loss.loss_calculator, LOSSES)
    _one_of("advantage", config.reward.advantage, ADVANTAGES)
    if config.agent.tool_call_parser is not None:
        _one_of("tool_call_parser", config.agent.tool_call_parser, TOOL_CALL_PARSERS)
    _one_of("new_context", config.context.new_context, NEW_CONTEXTS)
    longest = config.sampling.max_prompt_tokens
    if config.context.new_context != "disabled" and not (
        longest is not None and longest < config.sampling.max_tokens
    ):
        raise ConfigError(
            f"--new_context {config.context.new_context}: needs --max_prompt_tokens, below "
            f"--max_tokens ({config.sampling.max_tokens}), which ends a record"
        )
    _one_of("lr_scheduler_type", config.optimizer.lr_scheduler_type, SCHEDULES)
    _one_of("report_to", config.run.report_to, TRACKERS)
    _one_of("weight_update", config.services.weight_update, WEIGHT_UPDATES)
    _one_of("weight_update_pause", config.services.weight_update_pause, WEIGHT_UPDATE_PAUSES)
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
    for flag in fields(ReservedConfig):
        value = getattr(config.reserved, flag.name)
        if value != flag.default:
            raise ConfigError(
                f"--{flag.name} {value}: this version has only {flag.default}; leave the flag out"
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
    if config.sampling.num_generations < 2 and config.loss.loss_calculator != "CrossEntropy":
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
