"""How a flag of another trainer is taken: as flags of this one, without effect, or not at all."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from agentrl.configs.flag import ConfigError
from agentrl.redaction import without_passwords

Value = bool | int | float | str
# From the text of the flag, and the flags given beside it, to flags of this trainer. Raises
# `ValueError` with the reason for a text that it cannot read.
Translation = Callable[[str, Mapping[str, Any]], Mapping[str, Value]]

# Texts of a flag that is not set.
_UNSET = ("", "none", "null")
_TRUE, _FALSE = ("true", "yes", "on", "t", "y", "1"), ("false", "no", "off", "f", "n", "0")


class Treatment(StrEnum):
    """What is done with a familiar flag."""

    TRANSLATED = "translated"  # it becomes flags of this trainer
    IDLE = "idle"  # it is taken, and a line at the start says why it has nothing to do
    REFUSED = "refused"  # an error says what to use instead


@dataclass(frozen=True)
class FamiliarFlag:
    """A flag of another trainer.

    said: for a translated flag what it becomes, for an idle one why it has nothing to do here, for
        a refused one what to use instead
    harmless: values of a refused flag that ask for what is done anyway; they are taken
    several: whether several values may follow, as of a list
    """

    treatment: Treatment
    said: str
    harmless: tuple[str, ...] = ()
    translation: Translation | None = None
    several: bool = False

    def refuses(self, text: str) -> bool:
        """Whether the flag cannot have this value."""
        return self.treatment is Treatment.REFUSED and not asks_for(text, self.harmless)


def idle(said: str, *, several: bool = False) -> FamiliarFlag:
    """A flag that is taken and has nothing to do here."""
    return FamiliarFlag(Treatment.IDLE, said, several=several)


def refused(said: str, *harmless: str, several: bool = False) -> FamiliarFlag:
    """A flag that is taken with the `harmless` values only."""
    return FamiliarFlag(Treatment.REFUSED, said, harmless, several=several)


def translated(said: str, translation: Translation) -> FamiliarFlag:
    """A flag that becomes flags of this trainer."""
    return FamiliarFlag(Treatment.TRANSLATED, said, translation=translation)


def named(flag: str) -> FamiliarFlag:
    """A flag that has another name here."""
    return translated(f"`--{flag}`", lambda text, given: {flag: text})


def asks_for(text: str, values: Sequence[str]) -> bool:
    """Whether a text is one of the values, or leaves the flag unset. Spellings do not matter."""
    word = text.strip().lower()
    return word in _UNSET or _spelt(word) in {_spelt(value.lower()) for value in values}


def _spelt(word: str) -> str:
    with suppress(ValueError):
        word = f"{float(word):g}"
    if word in _TRUE:
        return "true"
    return "false" if word in _FALSE else word


def truth(text: str) -> bool:
    """Read a true|false text. Raises `ValueError`."""
    word = _spelt(text.strip().lower())
    if word not in ("true", "false"):
        raise ValueError("must be true or false")
    return word == "true"


def translate(
    familiar: Mapping[str, tuple[FamiliarFlag, str]], given: Mapping[str, Any]
) -> tuple[dict[str, Value], list[str]]:
    """Return the flags of this trainer that familiar flags become, and a line for each idle reason.

    `familiar`: each flag with its text, by name. `given`: the flags of this trainer beside them;
    what a familiar flag becomes takes precedence. Raises `ConfigError` for a refused value.
    """
    values: dict[str, Value] = {}
    reasons: dict[str, list[str]] = {}
    for name, (flag, text) in familiar.items():
        if flag.refuses(text):
            raise ConfigError(f"--{name} {without_passwords(text)}: {flag.said}")
        if flag.treatment is Treatment.IDLE:
            reasons.setdefault(flag.said, []).append(f"--{name}")
        if flag.translation is not None:
            try:
                values.update(flag.translation(text, {**given, **values}))
            except ValueError as error:
                raise ConfigError(f"--{name} {text}: {error}") from None
    return values, [f"{', '.join(names)}: {said}" for said, names in reasons.items()]
