"""What identifies an evaluation beside its model and tasks: flags, and their files' content."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.configs import Config, ConfigError
from agentrl.configs.flag import is_function, is_object
from agentrl.configs.flags import FLAGS, flags_named
from agentrl.configs.run_flags import stored_flags
from agentrl.file_digest import Digest, file_digest

# What makes a trajectory and its score: with another value it is another evaluation.
_MAKE_TRAJECTORIES = (
    *(
        name
        for name, flag in FLAGS.items()
        if flag.group in ("agent", "context")
        and name not in flags_named("mcp_auth_token", "mcp_sessions", "tool_timeout")
    ),
    *flags_named(
        "chat_template_kwargs", "max_turns", "max_tokens", "max_new_tokens", "max_prompt_tokens",
        "preferred_sampling_params", "presence_penalty", "frequency_penalty", "scorer_module",
    ),
)  # fmt: skip
# Those that name files, each with the files' content: an edited file is another evaluation.
_NAME_FILES = flags_named(
    "agent_command", "agent_config_path", "agent_entry", "agent_module", "mcp_manager_url",
    "scorer_module",
)  # fmt: skip
_DATA = (".json", ".yaml", ".yml")  # files that import nothing


@dataclass(frozen=True)
class SetUp:
    """How trajectories are made: rollouts of a task, flags, and digests of the flags' files."""

    rollouts: int
    flags: Mapping[str, Any]
    digests: Mapping[str, str]


def set_up_of(config: Config) -> SetUp:
    """The set-up of the flags, with their files as they are now.

    Raises `ConfigError` for a missing one.
    """
    return SetUp(config.data.eval_rollouts, making_flags(config), making_digests(config))


def making_flags(config: Config) -> Mapping[str, Any]:
    """The flags by which trajectories are made."""
    flags = stored_flags(config)
    return {name: flags[name] for name in sorted(_MAKE_TRAJECTORIES)}


def making_digests(config: Config) -> Mapping[str, str]:
    """Digests, by flag, of the files that the flags name. Raises `ConfigError` for a missing one.

    Of a command, words that are no files count as words.
    """
    return {name: _digest(files) for name, files in _files(config)}


def unseen(config: Config) -> list[str]:
    """What makes trajectories and is not compared from one command to the next, in words."""
    tools, command = config.agent.mcp_manager_url or "", config.agent.agent_command
    found = []
    if "://" in tools:
        found.append("behind the URL of --mcp_manager_url")
    elif is_object(tools) and not is_function(tools):
        found.append(f"in the module of --mcp_manager_url {tools}")
    elif tools and not is_function(tools):
        found.append(f"in the servers that {tools} names")
    files = [file.name for _, files in _files(config) for file in files]
    code = list(dict.fromkeys(name for name in files if not name.endswith(_DATA)))
    if code:
        found.append(f"in what {', '.join(code)} import{'s' * (len(code) == 1)}")
    elif command is not None:
        found.append(f"in the program `{command}`")
    return found


def _files(config: Config) -> Iterator[tuple[str, list[Path]]]:
    """The flags that name files that exist, each with these."""
    flags = making_flags(config)
    for name in _NAME_FILES:
        value = flags[name]
        found = [Path(word) for word in _paths(name, value or "") if Path(word).is_file()]
        if name != "agent_command" and not found and _names_object(value):
            raise ConfigError(f"--{name} {value}: there is no such Python file")
        if found:
            yield name, found


def _paths(name: str, value: str) -> list[str]:
    if name == "agent_command":
        try:
            return shlex.split(value)
        except ValueError:
            return []  # the agent refuses it
    return [value.rpartition(":")[0] if is_function(value) else value]


def _names_object(value: str | None) -> bool:
    return value is not None and is_function(value) and "://" not in value


def _digest(files: list[Path]) -> str:
    digest = Digest()
    for file in files:
        digest.part((file_digest(file) or "").encode())
    return digest.text()
