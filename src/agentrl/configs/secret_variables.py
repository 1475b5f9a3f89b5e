"""Secrets travel by environment variables: a command line is read by every user of a machine.

Two kinds. A flag in `_env` names a variable of the user's choice. The flags in `VARIABLES` may hold
a password themselves; each has a variable that stands for it, and by that the launcher hands it to
the processes that it starts.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from agentrl.configs.flag import ConfigError

VARIABLES: Mapping[str, str] = {
    "db_connection_string": "DB_URL",
    "mcp_manager_url": "MCP_URL",
    "mcp_auth_token": "MCP_AUTH_TOKEN",
}
# What an HTTP header takes, without spaces. SGLang takes what begins with a minus for a flag.
_KEY = re.compile(r"(?!-)[!-~]+")


def read_key(variable: str | None, flag: str) -> str | None:
    """The key in the environment variable that `--flag` names; None if it names none.

    Raises `ConfigError` if the variable is not set, or holds what is no key.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"--{flag} {variable}: the environment variable {variable} is not set")
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"--{flag} {variable}: the environment variable {variable} must hold a key of ASCII "
            "characters without spaces, which does not begin with a minus"
        )
    return key


def without_secret_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flags as a command line may show them: without those of `VARIABLES`."""
    return {name: value for name, value in values.items() if name not in VARIABLES}


def secret_environment(values: Mapping[str, Any]) -> dict[str, str]:
    """The other flags, as the environment of a process. A variable whose flag is not given is
    empty, which counts as not set."""
    return {variable: str(values.get(name) or "") for name, variable in VARIABLES.items()}


def flags_in_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The flags of `VARIABLES` that an environment gives, by their names."""
    return {
        name: text
        for name, variable in VARIABLES.items()
        if (text := environment.get(variable, "").strip())
    }
