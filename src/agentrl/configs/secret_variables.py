"""Environment variables for secrets. Every user of a machine can read a command line.

There are two kinds. A flag that ends in `_env` names a variable of the user's choice. A flag in
`VARIABLES` may contain a password; the launcher passes it to child processes in the variable given
there.
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
# Printable ASCII without spaces, for an HTTP header. SGLang parses a leading minus as a flag.
_KEY = re.compile(r"(?!-)[!-~]+")


def read_key(variable: str | None, flag: str) -> str | None:
    """Return the key in the environment variable that `--flag` names; None if it names none.

    Raises `ConfigError` if the variable is not set or its value is not a valid key.
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
    """Return the flags without those of `VARIABLES`, for a command line."""
    return {name: value for name, value in values.items() if name not in VARIABLES}


def secret_environment(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the flags of `VARIABLES` as environment variables. One that is not given is empty."""
    return {variable: str(values.get(name) or "") for name, variable in VARIABLES.items()}


def flags_in_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the flags of `VARIABLES` that are set in an environment, by flag name."""
    return {
        name: text
        for name, variable in VARIABLES.items()
        if (text := environment.get(variable, "").strip())
    }
