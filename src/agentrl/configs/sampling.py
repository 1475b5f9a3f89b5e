"""Flags of tasks, samplers, services, agents and rewards."""

from dataclasses import dataclass

from agentrl.configs.flag import FlagClass, flag
from agentrl.configs.losses import ADVANTAGES, loss_defaults
from agentrl.configs.secret_variables import read_key
from agentrl.configs.text_checks import (
    check_sampling_params,
    check_service_url,
    check_variable_name,
)

TOOL_CALL_PARSERS = (
    "qwen25", "qwen", "qwen3_coder", "mistral", "llama3", "deepseekv3", "pythonic", "kimi_k2",
    "glm45", "gpt-oss", "minicpm", "gemma4",
)  # fmt: skip
ANSWER_SCHEMAS = ("answer", "boxed")
NEW_CONTEXTS = ("disabled", "discard_all_tools", "discard_all")
TOOL_OUTAGES = ("hand_back", "text")
WEIGHT_UPDATES = ("disk", "distributed", "tensor")
WEIGHT_UPDATE_PAUSES = ("retract", "in_place")


@dataclass(frozen=True)
class DataConfig:
    """The tasks of training and evaluation."""

    train_file: str | None = flag(
        None,
        "file of the training tasks: JSONL, JSON or Parquet",
        unset="none; sampling needs it",
        kind="FILE",
        belongs=FlagClass.DATA,
    )
    eval_file: str | None = flag(
        None,
        "file of the held-out tasks: JSONL, JSON or Parquet",
        unset="none, and nothing is evaluated",
        kind="FILE",
        belongs=FlagClass.DATA,
    )
    num_train_epochs: float = flag(
        3.0, "number of epochs over the training tasks; --max_steps takes precedence", above=0
    )
    eval_steps: int | None = flag(
        None,
        "number of optimizer steps from one evaluation on the held-out tasks to the next, in "
        "addition to one before the first step and one at the end (0: no evaluation)",
        unset="before the first step and at the end",
        least=0,
    )
    eval_rollouts: int = flag(4, "number of rollouts of each held-out task", least=1)


@dataclass(frozen=True)
class SamplingConfig:
    """The sampling of trajectories: concurrency, limits, failures and time limits."""

    enable_sampling: bool = flag(
        True,
        "whether trajectories are sampled; if not, the trainer uses only the rows in the database",
        belongs=FlagClass.OWN,
    )
    sync_sampling: bool = flag(
        False,
        "whether sampling and training alternate: the current policy samples the trajectories of a "
        "step, and nothing is sampled during the step",
    )
    max_staleness: int = flag(
        2,
        "largest number of optimizer steps by which the trained weights may be newer than those "
        "that sampled a token; without a bound where --enable_sampling is false",
        least=0,
    )
    num_generations: int = flag(
        8, "number of rollouts of each training task, which form one group", least=1
    )
    fork_turns: int = flag(
        0,
        "largest number of turns of a finished rollout of training at which it is forked: sampled "
        "anew from there, for the credit of its turns (0: no forks)",
        least=0,
    )
    fork_at: str = flag(
        "entropy",
        "which turns are forked: those of the highest entropy, every one (or --fork_turns of them, "
        "evenly), or those after a failed tool call",
        choices=("entropy", "every", "after_tool_error"),
    )
    forks: int = flag(2, "number of forks at each forked turn", least=1)
    sampler_processes: int | None = flag(
        None,
        "number of sampler processes on a machine",
        unset="one for each core, at most 8; in a launch NUM_SAMPLERS, or one for each core that "
        "its other parts leave",
        least=1,
        belongs=FlagClass.OWN,
    )
    max_concurrent_samples_per_process: int = flag(
        64,
        "largest number of trajectories that one sampler process runs at once; a machine runs "
        "--sampler_processes times as many",
        least=1,
        belongs=FlagClass.OWN,
    )
    target_concurrency: int = flag(
        0,
        "target number of trajectories of a machine for each inference service; samplers run more "
        "while the service has room and fewer while it is overloaded (0: no target, only "
        "--max_concurrent_samples_per_process)",
        least=0,
        belongs=FlagClass.OWN,
    )
    max_turns: int = flag(200, "largest number of turns of a trajectory", least=1)
    max_tokens: int = flag(
        65536,
        "largest number of tokens of a context, a prompt and its answer; the longest sequence that "
        "is trained (a trajectory has several contexts if --new_context rewrites it)",
        least=2,
    )
    max_new_tokens: int = flag(8192, "largest number of sampled tokens of one turn", least=1)
    max_prompt_tokens: int | None = flag(
        None, "largest number of tokens of the prompt of one turn", unset="--max_tokens", least=1
    )
    preferred_sampling_params: str = flag(
        "{}",
        "sampling parameters as JSON, by their names in SGLang, for example "
        '{"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0}',
        kind="JSON",
        check=check_sampling_params,
    )
    presence_penalty: float = flag(
        0.0,
        "amount subtracted from the logit of each token that the turn already contains",
        least=-2,
        most=2,
    )
    frequency_penalty: float = flag(
        0.0,
        "amount subtracted from a token's logit for each of its occurrences in the turn",
        least=-2,
        most=2,
    )
    resample_error_records: bool = flag(
        True, "whether a rollout whose attempt ended in an error is attempted again"
    )
    max_failures: int = flag(
        3, "number of failed attempts after which a rollout is marked as failed", least=1
    )
    max_scoring_failures: int = flag(
        5,
        "number of failures to score a trajectory, or to finalise a group, after which it is put "
        "into quarantine; `agentrl release` puts it back",
        least=1,
    )
    max_failures_without_success: int = flag(
        128,
        "number of attempts after which the run ends if all of them fail, or three quarters of "
        "their rollouts in the same way; also the number of consecutive groups without a row to "
        "train after which the run ends; outages do not count (0: no limit)",
        least=0,
        belongs=FlagClass.TRAINING,
    )
    lease_seconds: float = flag(
        60.0,
        "seconds without a sign of life after which a sampler or trainer is considered dead",
        least=1,
        belongs=FlagClass.OWN,
    )
    drain_seconds: float = flag(
        30.0,
        "seconds after a stop signal (SIGTERM, Ctrl-C, SIGUSR1) in which samplers finish "
        "trajectories and the trainer saves a checkpoint, after the current step if there is time "
        "for both; it must be longer than a checkpoint takes to write",
        least=0,
        belongs=FlagClass.OWN,
    )
    record_timeout: float = flag(
        1800.0,
        "time limit of sampling one trajectory, and of each scoring of it, in seconds",
        least=0.1,
        belongs=FlagClass.OWN,
    )
    request_timeout: float = flag(
        600.0,
        "seconds without a new token after which a request moves to another inference service",
        least=0.1,
        belongs=FlagClass.OWN,
    )
    startup_timeout: float = flag(
        300.0,
        "time limit of the wait for MongoDB, tool servers and inference services at the start, in "
        "seconds",
        least=0.1,
        belongs=FlagClass.OWN,
    )
    inference_urls: str | None = flag(
        None,
        "URLs of inference services, separated by commas, in addition to the services registered "
        "in the database",
        unset="only registered services",
        kind="LIST",
        check=check_service_url,
        belongs=FlagClass.OWN,
    )
    inference_api_key_env: str | None = flag(
        None,
        "name of the environment variable that holds the key of all inference services, which is "
        "sent to them as a bearer token",
        unset="no key",
        kind="NAME",
        check=check_variable_name,
        belongs=FlagClass.OWN,
    )

    @property
    def inference_api_key(self) -> str | None:
        """The services' key; None without one. Raises `ConfigError` if its variable is not set."""
        return read_key(self.inference_api_key_env, "inference_api_key_env")


@dataclass(frozen=True)
class ServiceConfig:
    """The SGLang services that a launch starts, and the weight updates of all services."""

    weight_update: str = flag(
        "disk", "transport of new weights to the inference services", choices=WEIGHT_UPDATES
    )
    publish_steps: int = flag(
        1,
        "number of optimizer steps from one publication of weights to the next, within "
        "--max_staleness; a step that is evaluated and the last one are published too",
        least=1,
        belongs=FlagClass.SAMPLING,
    )
    weight_update_pause: str = flag(
        "retract",
        "treatment of the KV cache of running requests at a weight update: retract recomputes it "
        "with the new weights and in_place keeps it",
        choices=WEIGHT_UPDATE_PAUSES,
    )
    inf_tp_size: int = flag(
        1, "number of GPUs of an SGLang service over which tensor parallelism splits layers",
        least=1,
    )  # fmt: skip
    inf_ep_size: int = flag(
        1, "number of GPUs of an SGLang service over which experts are distributed", least=1
    )
    gpus_for_inference: int | None = flag(
        None,
        "number of GPUs of each machine that the services of a launch use",
        unset="chosen by the model's size",
        least=1,
    )
    inf_mem_ratio: float | None = flag(
        None,
        "share of a GPU's memory for a service's weights and cache, between 0 and 1",
        unset="planned by a launch",
        above=0,
        below=1,
    )
    inf_share_gpus: bool = flag(
        False,
        "whether inference services and trainer have the memory of their GPUs in turns: services "
        "release it while the trainer computes, whose state is on the host otherwise; needs "
        "--sync_sampling",
    )


@dataclass(frozen=True)
class AgentConfig:
    """Agents, their tools and their auxiliary models."""

    agent_name: str = flag(
        "mcp",
        "name of the agent of tasks that name none: mcp, single_turn, math, program, outside or a "
        "registered one",
        kind="NAME",
        belongs=FlagClass.DATA,
    )
    agent_module: str | None = flag(
        None, "Python file that registers agents", unset="none", kind="FILE"
    )
    agent_command: str | None = flag(
        None,
        "command that the agent program runs for each attempt; it finds the model where it would "
        "find OpenAI's or Anthropic's",
        unset="none",
        belongs=FlagClass.DATA,
    )
    agent_entry: str | None = flag(
        None,
        "function that the agent program calls for each attempt, written as FILE.py:NAME; it takes "
        "the task and the session",
        unset="none",
        belongs=FlagClass.DATA,
    )
    agent_sandbox: str | None = flag(
        None,
        "where --agent_command runs, with no network but the gateway: bubblewrap, in namespaces of "
        "this machine, or docker:IMAGE, in a container of an image that has python3",
        unset="as any process of the sampler's user",
    )
    agent_sandbox_folders: str = flag(
        ".",
        "folders that a program may read in its sandbox beside the system's, separated by commas; "
        "it begins in the first one",
        kind="LIST",
        belongs=FlagClass.OWN,
    )
    agent_memory_mib: int | None = flag(
        None,
        "memory of each process of --agent_command in MiB; in a container, of all together",
        unset="no limit",
        least=32,
    )
    agent_cpu_seconds: int | None = flag(
        None,
        "seconds of CPU time that each process of --agent_command may take",
        unset="no limit",
        least=1,
    )
    agent_processes: int | None = flag(
        None,
        "processes and threads that an attempt of --agent_command may have at once; needs "
        "--agent_sandbox",
        unset="no limit",
        least=1,
    )
    agent_disk_mib: int | None = flag(
        None,
        "size of a file that --agent_command may write in MiB; in a sandbox, of all files together",
        unset="no limit",
        least=1,
    )
    train_agents: str | None = flag(
        None,
        "names of the agents of a program that are trained, separated by commas; turns of others "
        "are sampled from the same weights and not trained",
        unset="all",
        kind="LIST",
    )
    agent_of_turn: str | None = flag(
        None,
        "function that names the agent of a program's request without the header x-agentrl-agent, "
        "written as FILE.py:NAME; it takes the messages and the tools",
        unset="a name that follows from system prompt and tools",
    )
    agent_models: str | None = flag(
        None,
        "agents of a program that other models answer, separated by commas, each with the URL of "
        "an OpenAI-compatible API, as in critic=https://api.host/v1; a request names the model",
        unset="none",
        kind="LIST",
    )
    agent_models_key_env: str | None = flag(
        None,
        "name of the environment variable that holds the key of --agent_models",
        unset="OPENAI_API_KEY, if it is set",
        kind="NAME",
        check=check_variable_name,
        belongs=FlagClass.OWN,
    )
    gateway_host: str = flag(
        "127.0.0.1",
        "address that the gateway listens on, where programs ask for tasks with the agent outside",
        kind="NAME",
        belongs=FlagClass.OWN,
    )
    gateway_port: int = flag(
        8800, "port that the gateway listens on; 0 takes a free one", least=0, belongs=FlagClass.OWN
    )
    gateway_key_env: str | None = flag(
        None,
        "name of the environment variable that holds the key that programs must show the gateway "
        "to get tasks; needed where other machines reach --gateway_host",
        unset="no key",
        kind="NAME",
        check=check_variable_name,
        belongs=FlagClass.OWN,
    )
    session_idle: float = flag(
        600.0,
        "seconds without a request after which a program with the agent outside has lost its "
        "session",
        above=0,
        belongs=FlagClass.OWN,
    )
    mcp_manager_url: str | None = flag(
        None,
        "tool servers: URLs of MCP servers, separated by commas, each optionally with a name as in "
        "NAME=URL; a URL that ends in /mcpapi is an aggregator; a config file with `mcpServers`; "
        "or an MCP server object, as FILE.py:NAME or MODULE:NAME",
        unset="no tools",
        kind="LIST",
        belongs=FlagClass.OWN,
    )
    mcp_server_name: str | None = flag(
        None,
        "names of the tool servers to use, separated by commas; for a single URL, the name of its "
        "server",
        unset="all",
        kind="LIST",
        belongs=FlagClass.DATA,
    )
    mcp_auth_token: str | None = flag(
        None,
        "bearer token for tool servers that are given by URL",
        unset="none",
        secret=True,
        belongs=FlagClass.OWN,
    )
    mcp_allow_tools: str | None = flag(
        None,
        "patterns of the tools that are offered to the model, separated by commas, each written "
        "as tool or server.tool",
        unset="all",
        kind="LIST",
        belongs=FlagClass.DATA,
    )
    mcp_block_tools: str | None = flag(
        None,
        "patterns of the tools that are not offered to the model, separated by commas, each "
        "written as tool or server.tool",
        unset="none",
        kind="LIST",
        belongs=FlagClass.DATA,
    )
    mcp_sessions: int = flag(
        1,
        "number of sessions with each tool server, which all trajectories of a process share",
        least=1,
        belongs=FlagClass.OWN,
    )
    tool_call_parser: str | None = flag(
        None,
        "format in which the model writes tool calls",
        choices=TOOL_CALL_PARSERS,
        unset="as its chat template does, or qwen25 if that writes none",
    )
    tool_timeout: float = flag(
        60.0, "time limit of one tool call, in seconds", least=0.1, belongs=FlagClass.OWN
    )
    on_tool_outage: str = flag(
        "hand_back",
        "treatment of an attempt whose tool server is unreachable: hand_back ends it without "
        "counting a failure and it is repeated, and text gives the model an error as the result",
        choices=TOOL_OUTAGES,
    )
    max_tool_result_chars: int = flag(
        100_000,
        "largest number of characters of a tool result that the model reads; the database keeps "
        "the whole result",
        least=1,
    )
    agent_config_path: str | None = flag(
        None,
        "YAML file that lists the auxiliary models of browse and scorer agents",
        unset="none",
        kind="FILE",
        belongs=FlagClass.OWN,
    )
    system_prompt: str | None = flag(
        None,
        "system message of every conversation whose task has none",
        unset="none",
        belongs=FlagClass.DATA,
    )
    answer_schema: str | None = flag(
        None,
        "form of the final answer of tasks that name none: answer, as in <answer>...</answer>, or "
        "boxed; a conversation without a system message then has one that asks for the form",
        choices=ANSWER_SCHEMAS,
        unset="the whole text is the answer",
        belongs=FlagClass.DATA,
    )


@dataclass(frozen=True)
class ContextConfig:
    """The treatment of long and of repetitive conversations."""

    new_context: str = flag(
        "disabled",
        "rewriting of a conversation whose prompt reaches --max_prompt_tokens, which begins a new "
        "segment",
        choices=NEW_CONTEXTS,
    )
    repetition_early_stop_times: int = flag(
        0,
        "number of turns of one same text at which a trajectory ends (0 or -1: no limit)",
        least=-1,
    )
    enable_repetition_compress: bool = flag(
        False,
        "whether a trajectory that --repetition_early_stop_times would end goes on in a new "
        "context instead, by --new_context",
    )
    repeated_turns_limit: int = flag(
        0,
        "number of turns that repeat the tool calls of earlier ones, with the same results, or "
        "that loop, at which a trajectory ends (0: no limit)",
        least=0,
    )
    remove_repeated_turns: bool = flag(
        False,
        "whether a turn that repeats the tool calls of earlier ones, with the same results, is "
        "removed from the conversation, together with its results",
    )
    browse_tools: str = flag(
        "*",
        "names or patterns of the tools whose long results browse_agent condenses for the model, "
        "separated by commas",
        kind="LIST",
    )
    browse_min_chars: int = flag(
        8000,
        "smallest number of characters of a tool result that browse_agent condenses for the model",
        least=0,
    )
    browse_max_chars: int = flag(
        200_000,
        "largest number of characters of a tool result that browse_agent gets; the rest is cut off",
        least=1,
    )


@dataclass(frozen=True)
class RewardConfig:
    """The scorers, the advantage and the selection of trajectories to train."""

    advantage: str | None = flag(
        None,
        "estimator of the advantages of a group's rollouts",
        choices=ADVANTAGES,
        function=True,
        unset="that of the loss's paper",
    )
    adv_scaling: float = flag(1.0, "factor by which every advantage is multiplied", above=0)
    min_score_spread: float = flag(
        0.0,
        "difference between the highest and the lowest score of a group below which none of it is "
        "trained",
        least=0,
    )
    drop_zero_advantage: bool = flag(
        True, "whether trajectories whose advantage is 0 are left out of training"
    )
    minimal_advantage: float | None = flag(
        None,
        "smallest advantage of a trained trajectory, in place of --drop_zero_advantage (0: that "
        "flag decides)",
        unset="--drop_zero_advantage decides",
    )
    balance_sample: bool = flag(
        False,
        "whether a group trains at most m + 1 wrong (score 0) and m + 2 right trajectories, drawn "
        "at random, where m is the smaller of their numbers",
    )
    balance_equally: bool = flag(
        False,
        "whether a group trains equally many right and wrong trajectories, drawn at random",
    )
    efficient_rewarding: bool = flag(
        False,
        "whether scores are moved by up to 0.1 before the advantage, by the rank of the number of "
        "turns: of right trajectories, the fewer turns the higher; of wrong ones, the more",
    )
    efficiency_bonus: bool = flag(
        False,
        "whether the advantage of a group's right trajectories is larger the fewer turns they took",
    )
    min_turns: int = flag(
        0,
        "number of turns that a right trajectory must exceed to be trained",
        least=0,
    )
    reserve_context_error_count: int | None = flag(
        None,
        "largest number of trained trajectories of a group that ended at a limit",
        unset="all",
        least=0,
    )
    scorer_module: str | None = flag(
        None, "Python file that registers scorers", unset="none", kind="FILE"
    )

    @property
    def estimator(self) -> str:
        """`advantage`, or that of GRPO if it is None."""
        return self.advantage or loss_defaults("GRPO").advantage

    @property
    def drops_zero(self) -> bool:
        """Whether Records whose advantages are all 0 are left out, if no other rule decides.

        With `score` the trainer computes the advantage later, so 0 does not mean zero gradient.
        """
        minimal = bool(self.minimal_advantage)
        return self.drop_zero_advantage and not minimal and self.estimator != "score"
