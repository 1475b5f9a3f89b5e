"""What a flag is, and what is wrong with one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal


class ConfigError(ValueError):
    """A flag has a value that it cannot have. The message is one sentence for the user."""


# What a text is, as `--help` names it. A LIST has commas between, in a file it may be a YAML list;
# JSON may be a mapping there.
Kind = Literal["TEXT", "NAME", "FILE", "DIR", "URL", "LIST", "JSON"]


@dataclass(frozen=True)
class FlagInfo:
    """What is known of a flag beside its name, type and default."""

    help: str
    unset: str | None  # what happens if it is not given; for flags whose default is None
    least: float | None
    choices: Sequence[str]
    function: bool  # whether path/to/file.py:function is taken beside the choices
    kind: Kind
    secret: bool  # never printed
    aliases: Sequence[str]  # further spellings, which are not listed


def flag(
    default: Any,
    help: str,
    *,
    unset: str | None = None,
    least: float | None = None,
    choices: Sequence[str] = (),
    function: bool = False,
    kind: Kind = "TEXT",
    secret: bool = False,
    aliases: Sequence[str] = (),
) -> Any:
    """A dataclass field that is a flag."""
    info = FlagInfo(help, unset, least, choices, function, kind, secret, aliases)
    return field(default=default, metadata={"flag": info})


def comma_separated(value: str | None) -> list[str]:
    """The parts of a flag that takes several."""
    return [part.strip() for part in (value or "").split(",") if part.strip()]


def is_function(value: str) -> bool:
    """Whether a flag's value names a function in a file."""
    return ".py:" in value


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was meant, if one is near."""
    return next(iter(get_close_matches(word, list(known), n=1)), None)
