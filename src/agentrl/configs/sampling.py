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

    train_file: str | None = flag(
        None,
        "training tasks: JSONL, JSON or Parquet",
        unset="none: needed to sample",
        kind="FILE",
    )
    eval_file: str | None = flag(
        None,
        "held-out tasks: JSONL, JSON or Parquet",
        unset="none, and nothing is evaluated",
        kind="FILE",
    )
    num_train_epochs: float = flag(3.0, "passes over the training tasks, if --max_steps is not set")
    eval_steps: int | None = flag(
        None,
        "evaluate on the held-out tasks before the first step, every so many steps and at the end "
        "(0: not at all)",
        unset="before the first step and at the end",
        least=0,
    )
    eval_rollouts: int = flag(4, "rollouts of each held-out task", least=1)


@dataclass(frozen=True)
class SamplingConfig:
    """How trajectories are sampled."""

    enable_sampling: bool = flag(True, "sample; false: train on the rows that the database holds")
    sync_sampling: bool = flag(
        False, "no overlap: sample for a step, train it, sample for the next"
    )
    max_staleness: int = flag(
        2, "how many steps samplers may run ahead, and a trained token may be old", least=0
    )
    num_generations: int = flag(8, "rollouts of each task, the group of its advantages", least=1)
    max_concurrent_samples_per_process: int = flag(
        64, "trajectories one sampler runs at once, at the most", least=1
    )
    target_concurrency: int = flag(
        0,
        "trajectories of a sampler for each inference service to aim at: more while it is clear, "
        "fewer while it is busy (0: as many as the process may run)",
        least=0,
    )
    max_turns: int = flag(200, "turns of a trajectory", least=1)
    max_tokens: int = flag(
        65536, "tokens of a trajectory, all turns and tool results together", least=2
    )
    max_new_tokens: int = flag(8192, "tokens of one turn", least=1)
    max_prompt_tokens: int | None = flag(
        None, "tokens of the longest prompt of a turn", unset="--max_tokens", least=1
    )
    preferred_sampling_params: str = flag(
        "{}",
        'sampling parameters: {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0}',
        kind="JSON",
    )
    presence_penalty: float = flag(0.0, "presence penalty of the sampling")
    frequency_penalty: float = flag(0.0, "frequency penalty of the sampling")
    resample_error_records: bool = flag(True, "try a slot again whose record ended in an error")
    max_failures: int = flag(3, "failed attempts at a rollout before it is given up", least=1)
    max_failures_without_success: int = flag(
        128,
        "end the run once so many attempts in a row failed, or so many groups in a row gave "
        "nothing to train, for longer than a short outage lasts (0: never)",
        least=0,
    )
    lease_seconds: float = flag(
        60.0, "a sampler or trainer silent for so long is taken for dead", least=1
    )
    drain_seconds: float = flag(
        30.0,
        "after SIGTERM, seconds that a sampler takes to finish trajectories in progress",
        least=0,
    )
    record_timeout: float = flag(1800.0, "seconds that one trajectory may take", least=0.1)
    request_timeout: float = flag(
        600.0, "seconds that one request to an inference service may take", least=0.1
    )
    startup_timeout: float = flag(
        300.0, "seconds to wait for MongoDB, tools and inference at start", least=0.1
    )
    inference_urls: str | None = flag(
        None,
        "URLs of inference services, comma separated, beside those registered in the database",
        unset="only those registered",
        kind="LIST",
    )


@dataclass(frozen=True)
class ServiceConfig:
    """SGLang services that a launch starts (SGLANG_COMMAND); how any service gets new weights."""

    weight_update: str = flag(
        "disk", "how new weights come to the inference services", choices=WEIGHT_UPDATES
    )
    weight_update_pause: str = flag(
        "retract",
        "what becomes of the keys and values of running requests at an update, which are "
        "recomputed under the new weights (retract) or kept (in_place)",
        choices=WEIGHT_UPDATE_PAUSES,
    )
    inf_tp_size: int = flag(1, "GPUs of a service that share each layer", least=1)
    inf_ep_size: int = flag(1, "GPUs of a service that share the experts", least=1)
    inf_mem_ratio: float | None = flag(
        None,
        "share of a GPU's memory for a service's weights and cache, between 0 and 1",
        unset="SGLang's choice",
    )
    inf_share_gpus: bool = flag(
        False, "services give their memory back while the trainer computes (with --sync_sampling)"
    )


@dataclass(frozen=True)
class AgentConfig:
    """Agents, their tools and the models that help."""

    agent_name: str = flag(
        "mcp", "agent of the tasks that name none: mcp, single_turn, math, ...", kind="NAME"
    )
    agent_module: str | None = flag(
        None, "Python file that registers agents", unset="none", kind="FILE"
    )
    mcp_manager_url: str | None = flag(
        None,
        "tool servers: the URL of an MCP server, or of an aggregator if it ends in /mcpapi; "
        "several with commas between (NAME=URL names one); or a config file with `mcpServers`",
        unset="no tools",
        kind="LIST",
    )
    mcp_server_name: str | None = flag(
        None,
        "names of the servers to use of several, comma separated; the name of a server given alone",
        unset="all",
        kind="LIST",
    )
    mcp_auth_token: str | None = flag(
        None, "bearer token for tool servers given by URL", unset="none", secret=True
    )
    mcp_allow_tools: str | None = flag(
        None,
        "patterns of the tools to offer, comma separated, as tool or server.tool",
        unset="all",
        kind="LIST",
    )
    mcp_block_tools: str | None = flag(
        None, "patterns of tools not to offer, comma separated", unset="none", kind="LIST"
    )
    mcp_sessions: int = flag(
        1, "sessions with each tool server that all trajectories share", least=1
    )
    tool_call_parser: str | None = flag(
        None,
        "how the model writes tool calls",
        choices=TOOL_CALL_PARSERS,
        unset="as its chat template does, or qwen25 if that writes none",
    )
    tool_timeout: float = flag(60.0, "seconds that one tool call may take", least=0.1)
    max_tool_result_chars: int = flag(
        100_000,
        "characters of a tool's result that the model reads; the database keeps the whole",
        least=1,
    )
    agent_config_path: str | None = flag(
        None, "YAML file with the models of browse and scorer agents", unset="none", kind="FILE"
    )
    system_prompt: str | None = flag(None, "system message of every conversation", unset="none")


@dataclass(frozen=True)
class ContextConfig:
    """What happens to a conversation that grows too long, or goes round in circles."""

    new_context: str = flag(
        "disabled",
        "what begins a new context when a prompt reaches --max_prompt_tokens",
        choices=NEW_CONTEXTS,
    )
    repetition_early_stop_times: int = flag(
        0,
        "end a trajectory after so many turns that repeat earlier ones (0 or -1: never)",
        least=-1,
    )
    enable_repetition_compress: bool = flag(
        False, "take a turn that repeats an earlier one out of the conversation, with its results"
    )
    browse_tools: str = flag(
        "*",
        "tools whose long results browse_agent reads: names or patterns, comma separated",
        kind="LIST",
    )
    browse_min_chars: int = flag(8000, "characters from which on a tool result is long", least=0)
    browse_max_chars: int = flag(
        200_000,
        "characters of a tool result that browse_agent is given: the rest is cut off",
        least=1,
    )


@dataclass(frozen=True)
class RewardConfig:
    """From scores to advantages."""

    advantage: str | None = flag(
        None,
        "advantage of a group",
        choices=ADVANTAGES,
        function=True,
        unset="that of the loss's paper",
    )
    adv_scaling: float = flag(1.0, "factor on every advantage")
    drop_zero_advantage: bool = flag(True, "leave out records whose advantage is 0")
    minimal_advantage: float | None = flag(
        None, "leave out records whose advantage is not greater than this", unset="none is"
    )
    balance_sample: bool = flag(False, "train as many wrong records of a group as right ones")
    efficient_rewarding: bool = flag(
        False, "rank the right records of a group by how little they needed"
    )
    min_turns: int = flag(0, "leave out right records with no more turns than this", least=0)
    reserve_context_error_count: int | None = flag(
        None,
        "of a group's records that ended at a limit, train only so many",
        unset="all",
        least=0,
    )
    scorer_module: str | None = flag(
        None, "Python file that registers scorers", unset="none", kind="FILE"
    )

    @property
    def estimator(self) -> str:
        """`advantage`; GRPO's where neither the flag nor a loss names one."""
        return self.advantage or loss_defaults("GRPO").advantage
