"""JSON files of a run's folder: how it was launched, and which run it is."""

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from agentrl.configs.flag import ConfigError

T = TypeVar("T")


def read_run_json(path: Path, kind: type[T]) -> T | None:
    """The value that the file holds; None if there is no such file.

    Raises `ConfigError` if it is not whole: somebody else has written in it.
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
