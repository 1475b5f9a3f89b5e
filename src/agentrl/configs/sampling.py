"""Flags of tasks, samplers, services, agents and rewards."""

from dataclasses import dataclass

from agentrl.configs.flag import flag
from agentrl.configs.losses import ADVANTAGES, loss_defaults

TOOL_CALL_PARSERS = (
    "qwen25", "qwen", "qwen3_coder", "mistral", "llama3", "deepseekv3", "pythonic", "kimi_k2",
    "glm45", "gpt-oss", "minicpm",
)  # fmt: skip
NEW_CONTEXTS = ("disabled", "discard_all_tools", "discard_all")
WEIGHT_UPDATES = ("disk", "distributed", "tensor")
WEIGHT_UPDATE_PAUSES = ("retract", "in_place")


@dataclass(frozen=True)
class DataConfig:
    """Tasks."""

    train_file: str | None = flag(None, "training tasks: JSONL, JSON or Parquet")
    eval_file: str | None = flag(None, "held-out tasks: JSONL, JSON or Parquet")
    num_train_epochs: float = flag(3.0, "passes over the training tasks, if --max_steps is not set")
    eval_steps: int = flag(0, "evaluate on the held-out tasks every so many steps (0: never)")
    eval_attempts: int = flag(4, "attempts at each held-out task")


@dataclass(frozen=True)
class SamplingConfig:
    """How trajectories are sampled."""

    enable_sampling: bool = flag(True, "sample; off: train on the rows that the database holds")
    sync_sampling: bool = flag(
        False, "no overlap: sample for a step, train it, sample for the next"
    )
    max_staleness: int = flag(
        2, "how many steps samplers may run ahead, and a trained token may be old"
    )
    num_generations: int = flag(8, "attempts at each task, the group of its advantages")
    max_concurrent_samples_per_process: int = flag(
        64, "trajectories one sampler runs at once, at the most"
    )
    target_concurrency: int = flag(
        0,
        "trajectories of a sampler for each inference service to aim at: more while it is clear, "
        "fewer while it is busy (0: as many as the process may run)",
    )
    max_turns: int = flag(200, "turns of a trajectory")
    max_tokens: int = flag(65536, "tokens of a trajectory, all turns and tool results together")
    max_new_tokens: int = flag(8192, "tokens of one turn")
    max_prompt_tokens: int | None = flag(None, "longest prompt of a turn (default --max_tokens)")
    preferred_sampling_params: str = flag(
        "{}", 'JSON of sampling parameters: {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0}'
    )
    presence_penalty: float = flag(0.0, "presence penalty of the sampling")
    frequency_penalty: float = flag(0.0, "frequency penalty of the sampling")
    resample_error_records: bool = flag(True, "try a slot again whose record ended in an error")
    max_attempts: int = flag(3, "attempts at a slot before it is given up as failed")
    lease_seconds: float = flag(60.0, "a sampler or trainer silent for so long is taken for dead")
    drain_seconds: float = flag(
        30.0, "after SIGTERM, seconds that a sampler takes to finish trajectories in progress"
    )
    record_timeout: float = flag(1800.0, "seconds that one trajectory may take")
    request_timeout: float = flag(
        600.0, "seconds that one request to an inference service may take"
    )
    startup_timeout: float = flag(
        300.0, "seconds to wait for MongoDB, tools and inference at start"
    )
    inference_urls: str | None = flag(
        None, "comma separated URLs of inference services, beside those registered in the database"
    )


@dataclass(frozen=True)
class ServiceConfig:
    """SGLang services that a launch starts (SGLANG_COMMAND); how any service gets new weights."""

    weight_update: str = flag(
        "disk", f"how new weights come to the inference services: {', '.join(WEIGHT_UPDATES)}"
    )
    weight_update_pause: str = flag(
        "retract",
        "what running requests do at an update: retract (their keys and values are recomputed "
        "under the new weights) or in_place (those of the old weights are kept)",
    )
    inf_tp_size: int = flag(1, "GPUs of a service that share each layer")
    inf_ep_size: int = flag(1, "GPUs of a service that share the experts")
    inf_mem_ratio: float | None = flag(
        None, "share of a GPU's memory for a service's weights and cache (default: SGLang's choice)"
    )
    inf_share_gpus: bool = flag(
        False, "services give their memory back while the trainer computes (with --sync_sampling)"
    )


@dataclass(frozen=True)
class AgentConfig:
    """Agents, their tools and the models that help."""

    agent_name: str = flag("mcp", "agent of the tasks that name none: mcp, single_turn, math, ...")
    agent_module: str | None = flag(None, "Python file that registers agents")
    mcp_manager_url: str | None = flag(
        None,
        "tool servers: the URL of an MCP server, or of an aggregator if it ends in /mcpapi; "
        "several with commas between (NAME=URL names one); or a config file with `mcpServers`",
    )
    mcp_server_name: str | None = flag(
        None,
        "comma separated names of the servers to use, of several (default: all); the name of a "
        "server given alone",
    )
    mcp_auth_token: str | None = flag(None, "bearer token for servers given by URL")
    mcp_allow_tools: str | None = flag(
        None,
        "comma separated patterns of the tools to offer, as tool or server.tool (default: all)",
    )
    mcp_block_tools: str | None = flag(None, "comma separated patterns of tools not to offer")
    mcp_sessions: int = flag(1, "sessions with each tool server that all trajectories share")
    tool_call_parser: str | None = flag(
        None,
        f"how the model writes tool calls: {', '.join(TOOL_CALL_PARSERS)} (default: as its "
        "chat template does, or qwen25 if that writes none)",
    )
    tool_timeout: float = flag(60.0, "seconds that one tool call may take")
    max_tool_result_chars: int = flag(
        100_000, "characters of a tool's result that the model reads; the database keeps the whole"
    )
    agent_config_path: str | None = flag(
        None, "YAML file with the models of browse and scorer agents"
    )
    system_prompt: str | None = flag(None, "system message of every conversation")


@dataclass(frozen=True)
class ContextConfig:
    """What happens to a conversation that grows too long, or goes round in circles."""

    new_context: str = flag(
        "disabled",
        f"when a prompt reaches --max_prompt_tokens: {', '.join(NEW_CONTEXTS)}",
    )
    repetition_early_stop_times: int = flag(
        0, "end a trajectory after so many turns that repeat earlier ones (0 or -1: never)"
    )
    enable_repetition_compress: bool = flag(
        False, "take a turn that repeats an earlier one out of the conversation, with its results"
    )
    browse_tools: str = flag(
        "*", "tools whose long results browse_agent reads: names or patterns, comma separated"
    )
    browse_min_chars: int = flag(8000, "characters from which on a tool result is long")
    browse_max_chars: int = flag(
        200_000, "characters of a tool result that browse_agent is given: the rest is cut off"
    )


@dataclass(frozen=True)
class RewardConfig:
    """From scores to advantages."""

    advantage: str | None = flag(
        None,
        f"advantage of a group: {', '.join(ADVANTAGES)}; or path/to/file.py:function (default: "
        "that of the loss's paper)",
    )
    adv_scaling: float = flag(1.0, "factor on every advantage")
    drop_zero_advantage: bool = flag(True, "leave out records whose advantage is 0")
    minimal_advantage: float | None = flag(
        None, "leave out records whose advantage is not greater than this"
    )
    balance_sample: bool = flag(False, "train as many wrong records of a group as right ones")
    efficient_rewarding: bool = flag(
        False, "rank the right records of a group by how little they needed"
    )
    min_turns: int = flag(0, "leave out right records with no more turns than this")
    reserve_context_error_count: int | None = flag(
        None, "of a group's records that ended at a limit, train only so many (default: all)"
    )
    scorer_module: str | None = flag(None, "Python file that registers scorers")

    @property
    def estimator(self) -> str:
        """`advantage`; GRPO's where neither the flag nor a loss names one."""
        return self.advantage or loss_defaults("GRPO").advantage
