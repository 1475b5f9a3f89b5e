"""Flags from a YAML file, `--config run.yml`: a mapping from flags to their values.

A flag that takes several values, separated by commas, may be a list. A flag that takes JSON may be
a mapping. A null counts as absent.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from agentrl.configs.command_line import read_familiar
from agentrl.configs.familiar import FAMILIAR
from agentrl.configs.flag import ConfigError, nearest
from agentrl.configs.flags import FLAGS, Flag, Value


def read_run_file(path: str) -> dict[str, Value]:
    """Read the flags of a YAML file. Raises `ConfigError`, which names the file and the key."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: not YAML ({reason})") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be lines of `flag: value`, as `max_turns: 8`")
    values: dict[str, Value] = {}
    familiar: dict[str, str] = {}
    for key, value in content.items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name in FAMILIAR:
            if value is not None:
                familiar[name] = _text(value)
            continue
        flag = _flag(path, str(key))
        if value is not None:
            values[flag.name] = _value(path, flag, value)
    try:
        return values | read_familiar(familiar, values)
    except ConfigError as error:
        raise _of_file(path, error) from None


def _flag(path: str, key: str) -> Flag:
    name = key.removeprefix("--").replace("-", "_")
    for flag in FLAGS.values():
        if name in (flag.name, *flag.info.aliases):
            return flag
    meant = nearest(name, FLAGS)
    hint = f"did you mean {meant}? " if meant else ""
    raise ConfigError(f"{path}: unknown flag {key}: {hint}`agentrl train --help` lists them all")


def _value(path: str, flag: Flag, value: Any) -> Value:
    """Convert a YAML value by the rules of the command line. Raises `ConfigError`."""
    kind = flag.info.kind
    if isinstance(value, dict) and kind == "JSON":
        return json.dumps(value)
    if isinstance(value, list) and kind == "LIST":
        if any(isinstance(part, dict | list) or "," in str(part) for part in value):
            raise ConfigError(f"{path}: {flag.name}: must be a list of texts without commas")
        return ",".join(str(part) for part in value)
    if isinstance(value, dict | list):
        wanted = {"JSON": "a mapping", "LIST": "a list"}.get(kind, "a single value")
        given = "mapping" if isinstance(value, dict) else "list"
        raise ConfigError(f"{path}: {flag.name}: must be {wanted}, and is a {given}")
    try:
        return flag.read(_text(value))
    except ConfigError as error:
        raise _of_file(path, error) from None


def _of_file(path: str, error: ConfigError) -> ConfigError:
    """ "--max_turns many: must be ..." becomes "FILE: max_turns many: must be ..." """
    return ConfigError(f"{path}: {str(error).removeprefix('--')}")


def _text(value: Any) -> str:
    """A YAML value as the text of a flag."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
