"""What a flag is, and what is wrong with one."""

from dataclasses import field
from typing import Any


class ConfigError(ValueError):
    """A flag has a value that it cannot have. The message is one sentence for the user."""


def comma_separated(value: str | None) -> list[str]:
    """The parts of a flag that takes several."""
    return [part.strip() for part in (value or "").split(",") if part.strip()]


def flag(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field that is a flag."""
    return field(default=default, metadata={"help": help, **metadata})
