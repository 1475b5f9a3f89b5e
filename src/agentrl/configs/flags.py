"""Every flag as data: what the command line, a file of flags and the help know of it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from agentrl.configs.config import Config
from agentrl.configs.flag import ConfigError, FlagInfo, is_function, nearest
from agentrl.redaction import without_passwords

Value = bool | int | float | str

_TRUTHS = {
    **dict.fromkeys(("true", "yes", "on", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "off", "f", "n", "0"), False),
}


@dataclass(frozen=True)
class Flag:
    """A flag of a run."""

    name: str
    group: str  # the field of `Config` that it belongs to
    type: type
    default: Value | None
    info: FlagInfo

    def read(self, text: str) -> Value:
        """The value that a text gives. Raises `ConfigError`."""
        if self.type is str:
            return text
        try:
            value: Value = _TRUTHS[text.lower()] if self.type is bool else self.type(text)
        except (KeyError, ValueError):
            raise ConfigError(f"--{self.name} {text}: must be {_WANTED[self.type]}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{self.name} {text}: must be a finite number")
        return value

    def check(self, value: Value | None) -> None:
        """Raises `ConfigError` for a value out of its range."""
        info = self.info
        if value is None:
            return
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{self.name} {value}: must be a finite number")
        if info.least is not None and not isinstance(value, str) and value < info.least:
            raise ConfigError(f"--{self.name} {value}: must be at least {info.least:g}")
        if isinstance(value, str) and info.choices and value not in info.choices:
            if info.function and is_function(value):
                return
            meant = nearest(value, info.choices)
            raise ConfigError(
                f"--{self.name} {value}: not known"
                + (f" (did you mean {meant}?)" if meant else "")
                + f"; known: {', '.join(info.choices)}"
                + (", and path/to/file.py:function" if info.function else "")
            )

    @property
    def metavar(self) -> str:
        """Its value, in `--help`."""
        if self.type is bool:
            return "true|false"
        if self.type is str:
            return "NAME" if self.info.choices else self.info.kind
        return "N" if self.type is int else "X"

    @property
    def meaning(self) -> str:
        """What it does, and which values it knows."""
        if not self.info.choices:
            return self.info.help
        function = "; or path/to/file.py:function" if self.info.function else ""
        return f"{self.info.help}: {', '.join(self.info.choices)}{function}"


_WANTED = {bool: "true or false", int: "a whole number", float: "a number"}


def written(value: Value) -> str:
    """A value as the command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


def shown(flag: Flag, value: Value) -> str:
    """A value for people: without passwords."""
    return "(not shown)" if flag.info.secret else without_passwords(written(value))


def plain(flag: Flag, value: Value | None) -> Any:
    """A value as YAML and JSON have it: that of a JSON flag is an object there."""
    return json.loads(str(value)) if flag.info.kind == "JSON" and value is not None else value


def _flags() -> Mapping[str, Flag]:
    found: dict[str, Flag] = {}
    for group in fields(Config):
        types = get_type_hints(group.type)
        for item in fields(group.type):  # type: ignore[arg-type]
            kinds = [kind for kind in get_args(types[item.name]) if kind is not type(None)]
            default: Any = item.default
            found[item.name] = Flag(
                name=item.name,
                group=group.name,
                type=kinds[0] if kinds else types[item.name],
                default=default,
                info=item.metadata["flag"],
            )
    return found


FLAGS = _flags()
TITLES: Mapping[str, str] = {group.name: group.metadata["title"] for group in fields(Config)}
