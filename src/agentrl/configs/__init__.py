"""Every flag of a run, in grouped dataclasses that are flat on the command line.

Trainer, samplers and evaluation of one run read the same flags, so that one line starts any of
them on any machine. A group is handed to the code that needs it; nothing reads flags by name.

    sampling.py   tasks, samplers, services, agents, rewards
    training.py   model, loss, optimizer, computation, processes, checkpoints
    losses.py     the losses by name, and the defaults that go with each
    config.py     the run, and all groups as one `Config`
    trackers.py   the trackers of `--report_to`
    flag.py, flags.py   the declaration of a flag; all flags as data
    text_checks.py      checks of the text of one flag
    combinations.py     checks that involve several flags
    command_line.py, run_file.py   parsers of a command line and of a YAML file
    parsing.py    all of these to a checked `Config`
    run_flags.py  the flags that a run stores and compares
    secret_variables.py   environment variables for secrets
    preferences.py      the losses of `agentrl dpo`
    verbs.py, supervised_verbs.py   the command line of each verb
    digests.py    digests of a model's content
    run_json.py   JSON files of a run's folder
    model_path.py   checks of a model folder
    user_module.py   a user's own file that a flag names
"""

from agentrl.configs.config import Config, RunConfig, check_traces
from agentrl.configs.flag import ConfigError, comma_separated
from agentrl.configs.model_path import model_folder, trainable_folder
from agentrl.configs.parsing import parse_config
from agentrl.configs.sampling import (
    TOOL_CALL_PARSERS,
    AgentConfig,
    ContextConfig,
    DataConfig,
    RewardConfig,
    SamplingConfig,
    ServiceConfig,
)
from agentrl.configs.trackers import trackers_of
from agentrl.configs.training import (
    TREE_ATTENTION,
    CheckpointConfig,
    ComputeConfig,
    CriticConfig,
    LearnerConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)

__all__ = [
    "TOOL_CALL_PARSERS",
    "TREE_ATTENTION",
    "AgentConfig",
    "CheckpointConfig",
    "ComputeConfig",
    "Config",
    "ConfigError",
    "ContextConfig",
    "CriticConfig",
    "DataConfig",
    "LearnerConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "RunConfig",
    "SamplingConfig",
    "ServiceConfig",
    "check_traces",
    "comma_separated",
    "model_folder",
    "parse_config",
    "trackers_of",
    "trainable_folder",
]
