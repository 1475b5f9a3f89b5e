"""The declaration of one flag: default, help, bounds, choices and class.

`combinations` has the rules that involve several flags.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, Literal

_OBJECT = re.compile(r"(?:.*\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")


class ConfigError(ValueError):
    """A flag has an invalid value. The message is one sentence for the user."""


class FlagClass(StrEnum):
    """How a changed value of a flag is treated when a run is resumed or joined."""

    DATA = "data"  # a resume refuses it without --change_data
    FIXED = "fixed"  # a resume refuses it
    SAMPLING = "sampling"  # a resume takes it; all samplers of the run must have it
    TRAINING = "training"  # a resume takes it; samplers do not read it
    OWN = "own"  # belongs to one process on one machine; it is not compared


# The kind of a text flag, which `--help` shows as its value. A LIST is separated by commas; a YAML
# file may give it as a list. JSON is an object; a YAML file may give it as a mapping.
Kind = Literal["TEXT", "NAME", "FILE", "DIR", "URL", "LIST", "JSON"]


@dataclass(frozen=True)
class FlagInfo:
    """The properties of a flag other than its name, type and default."""

    help: str  # one complete sentence with the unit; `--help` appends the default
    unset: str | None  # the effect of leaving the flag out; only for flags whose default is None
    least: float | None  # inclusive lower bound of a number
    most: float | None  # inclusive upper bound
    above: float | None  # exclusive lower bound
    below: float | None  # exclusive upper bound
    choices: Sequence[str]
    function: bool  # whether path/to/file.py:function is accepted in addition to the choices
    only: str | None  # why only the default is accepted; None if other values are accepted
    # Checks a text, or each part of a LIST. Raises `ValueError` with the reason.
    check: Callable[[str], None] | None
    kind: Kind
    secret: bool  # never printed and never stored in a database
    belongs: FlagClass | None  # None: the class of the flag's group
    aliases: Sequence[str]  # further spellings, which `--help` does not list


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
    """Return a dataclass field that declares a flag. `FlagInfo` describes the arguments."""
    info = FlagInfo(
        help, unset, least, most, above, below, choices, function, only, check, kind, secret,
        belongs, aliases,
    )  # fmt: skip
    return field(default=default, metadata={"flag": info})


def group(title: str, belongs: FlagClass) -> dict[str, Any]:
    """Return the metadata of a group of flags: its title and the default class of its flags."""
    return {"title": title, "belongs": belongs}


def comma_separated(value: str | None) -> list[str]:
    """Split the value of a LIST flag. Empty parts are left out."""
    return [part.strip() for part in (value or "").split(",") if part.strip()]


def is_function(value: str) -> bool:
    """Whether a flag's value names a function in a file."""
    return ".py:" in value


def is_object(value: str) -> bool:
    """Whether a flag's value names an object in a file or in an installed module."""
    return _OBJECT.fullmatch(value) is not None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar to `word`; None if none is similar enough."""
    return next(iter(get_close_matches(word, list(known), n=1)), None)
