"""All flags as data, for the command line, YAML files and the help."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from agentrl.configs.config import Config
from agentrl.configs.flag import (
    ConfigError,
    FlagClass,
    FlagInfo,
    comma_separated,
    is_function,
    nearest,
)
from agentrl.configs.text_checks import json_object
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
    belongs: FlagClass

    def read(self, text: str) -> Value:
        """Convert a text to a value of the flag's type. Raises `ConfigError` if it is none."""
        if self.type is str:
            return text
        try:
            value: Value = read_truth(text) if self.type is bool else self.type(text)
        except ValueError:
            raise ConfigError(f"--{self.name} {text}: must be {_WANTED[self.type]}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{self.name} {text}: must be a finite number")
        return value

    def check(self, value: Value | None) -> None:
        """Raise `ConfigError` if the flag does not accept the value."""
        if value is None:
            return
        if self.info.only is not None and value != self.default:
            raise ConfigError(f"--{self.name} {written(value)}: {self.info.only}")
        if isinstance(value, str):
            self._check_text(value)
        else:
            self._check_number(value)

    def _check_number(self, value: bool | int | float) -> None:
        if not math.isfinite(value):
            raise ConfigError(f"--{self.name} {value}: must be a finite number")
        info = self.info
        inside = (
            (info.least is None or value >= info.least)
            and (info.most is None or value <= info.most)
            and (info.above is None or value > info.above)
            and (info.below is None or value < info.below)
        )
        if not inside:
            raise ConfigError(f"--{self.name} {written(value)}: must {self.bounds}")

    def _check_text(self, value: str) -> None:
        info = self.info
        parts = comma_separated(value) if info.kind == "LIST" else [value]
        unknown = next((part for part in parts if part not in info.choices), None)
        if info.choices and unknown is not None:
            if info.function and is_function(value):
                return
            meant = nearest(unknown, info.choices)
            raise ConfigError(
                f"--{self.name} {unknown}: not known"
                + (f" (did you mean {meant}?)" if meant else "")
                + f"; known: {', '.join(info.choices)}"
                + (", and path/to/file.py:function" if info.function else "")
            )
        for part in parts:
            try:
                if info.kind == "JSON":
                    json_object(part)
                if info.check is not None:
                    info.check(part)
            except ValueError as error:
                given = part if info.kind == "JSON" or part.split() == [part] else repr(part)
                raise ConfigError(f"--{self.name} {without_passwords(given)}: {error}") from None

    @property
    def bounds(self) -> str:
        """The bounds of a number as the end of "must ..."; empty if there are none."""
        info = self.info
        for low, high in ((info.least, info.most), (info.above, info.below)):
            if low is not None and high is not None:
                return f"lie between {low:g} and {high:g}"
        parts = [
            f"{words} {bound:g}"
            for words, bound in (
                ("at least", info.least),
                ("above", info.above),
                ("at most", info.most),
                ("below", info.below),
            )
            if bound is not None
        ]
        return f"be {' and '.join(parts)}" if parts else ""

    @property
    def metavar(self) -> str:
        """The placeholder of the value in `--help`."""
        if self.type is bool:
            return "true|false"
        if self.type is str:
            return "NAME" if self.info.choices else self.info.kind
        return "N" if self.type is int else "X"

    @property
    def meaning(self) -> str:
        """The help sentence, with the choices."""
        if not self.info.choices:
            return self.info.help
        function = ", or path/to/file.py:function" if self.info.function else ""
        return f"{self.info.help}; one of {', '.join(self.info.choices)}{function}"


def read_truth(text: str) -> bool:
    """Convert a text that says true or false. Raises `ValueError` if it is none."""
    try:
        return _TRUTHS[text.lower()]
    except KeyError:
        raise ValueError("must be true or false") from None


_WANTED = {bool: "true or false", int: "a whole number", float: "a number"}


def written(value: Value) -> str:
    """Format a value as the command line accepts it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


def holds_secret(flag: Flag, value: Value) -> bool:
    """Whether a value is a secret or contains one, such as a password in a URL."""
    text = written(value)
    return flag.info.secret or without_passwords(text) != text


def shown(flag: Flag, value: Value) -> str:
    """Format a value for display, without passwords."""
    return "(not shown)" if flag.info.secret else without_passwords(written(value))


def plain(flag: Flag, value: Value | None) -> Any:
    """Convert a value for YAML or JSON output. The text of a JSON flag becomes an object."""
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
                belongs=item.metadata["flag"].belongs or group.metadata["belongs"],
            )
    return found


FLAGS = _flags()
TITLES: Mapping[str, str] = {group.name: group.metadata["title"] for group in fields(Config)}


def flags_named(*names: str) -> tuple[str, ...]:
    """Return the names, checked. Raises `KeyError` if there is no flag of that name."""
    for name in names:
        if name not in FLAGS:
            raise KeyError(f"there is no flag --{name}")
    return names
