"""What a flag is, and what is wrong with one.

Everything about one flag stands where the flag is declared: default, help, bounds, choices, what
another value means for a run that has begun. What two flags must be together is `combinations`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, Literal


class ConfigError(ValueError):
    """A flag has a value that it cannot have. The message is one sentence for the user."""


class FlagClass(StrEnum):
    """What another value of a flag means for a run that has begun."""

    DATA = "data"  # another run: refused, or taken with --change_data
    FIXED = "fixed"  # another run: refused
    SAMPLING = "sampling"  # a resume takes it, and all samplers of the run must have it
    TRAINING = "training"  # a resume takes it; samplers do not read it
    OWN = "own"  # of one process on one machine


# What a text is, as `--help` names it. A LIST has commas between, in a file it may be a YAML list;
# JSON is an object, and may be a mapping there.
Kind = Literal["TEXT", "NAME", "FILE", "DIR", "URL", "LIST", "JSON"]


@dataclass(frozen=True)
class FlagInfo:
    """What is known of a flag beside its name, type and default."""

    help: str  # one sentence that stands alone, with its unit; the default is added to it
    unset: str | None  # what happens if it is not given; for flags whose default is None
    least: float | None  # bounds of a number: `least` and `most` may be taken,
    most: float | None
    above: float | None  # `above` and `below` may not
    below: float | None
    choices: Sequence[str]
    function: bool  # whether path/to/file.py:function is taken beside the choices
    only: str | None  # why no other value than the default is taken; None if others are
    # Of a text, of each part of a LIST: raises `ValueError` with what is wrong.
    check: Callable[[str], None] | None
    kind: Kind
    secret: bool  # never printed, never in a database
    belongs: FlagClass | None  # None: as the other flags of its group
    aliases: Sequence[str]  # further spellings, which are not listed


def flag(
    default: Any,
    help: str,
    *,
    unset: str | None = None,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Sequence[str] = (),
    function: bool = False,
    only: str | None = None,
    check: Callable[[str], None] | None = None,
    kind: Kind = "TEXT",
    secret: bool = False,
    belongs: FlagClass | None = None,
    aliases: Sequence[str] = (),
) -> Any:
    """A dataclass field that is a flag; `FlagInfo` says what the arguments are."""
    info = FlagInfo(
        help, unset, least, most, above, below, choices, function, only, check, kind, secret,
        belongs, aliases,
    )  # fmt: skip
    return field(default=default, metadata={"flag": info})


def group(title: str, belongs: FlagClass) -> dict[str, Any]:
    """What is known of a group of flags: its title for people, and the class of its flags."""
    return {"title": title, "belongs": belongs}


def comma_separated(value: str | None) -> list[str]:
    """The parts of a flag that takes several."""
    return [part.strip() for part in (value or "").split(",") if part.strip()]


def is_function(value: str) -> bool:
    """Whether a flag's value names a function in a file."""
    return ".py:" in value


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was meant, if one is near."""
    return next(iter(get_close_matches(word, list(known), n=1)), None)
