"""Reads the JSON files of a run's folder: the launch and the run's identity."""

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from agentrl.configs.flag import ConfigError

T = TypeVar("T")


def read_run_json(path: Path, kind: type[T]) -> T | None:
    """Read a value of type `kind` from the file; None if there is no such file.

    Raises `ConfigError` if the content is invalid. Files are written atomically, so an invalid one
    was changed from outside.
    """
    if not path.is_file():
        return None
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except ValidationError:
        raise ConfigError(
            f"{path} is damaged: restore it, or remove the run with `agentrl delete RUN` and "
            "start again"
        ) from None
