"""What a flag is, and what is wrong with one."""

from collections.abc import Sequence
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


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Raises `ConfigError` if the value of a flag is none of those it can have."""
    if value not in known:
        raise ConfigError(f"--{name} {value}: not known; known: {', '.join(known)}")


def one_of_or_function(name: str, value: str, known: Sequence[str]) -> None:
    """`one_of` for a flag that also takes a function in the user's own file."""
    if not is_function(value) and value not in known:
        raise ConfigError(
            f"--{name} {value}: not known; known: {', '.join(known)}, and path/to/file.py:function"
        )


def is_function(value: str) -> bool:
    """Whether a flag's value names a function in a file."""
    return ".py:" in value
