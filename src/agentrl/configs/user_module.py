"""Loads a user's Python file, which registers agents or scorers or defines a function."""

import logging
import sys
import traceback
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.configs.flag import ConfigError
from agentrl.foreign_text import error_line, one_line
from agentrl.original_names import install

log = logging.getLogger(__name__)


def load_user_function(value: str, flag: str) -> Callable[..., Any]:
    """Load the function that a flag names as `path/to/file.py:function`.

    Raises `ConfigError` if the file does not exist, raises, or has no such function.
    """
    path, _, name = value.rpartition(":")
    function: Callable[..., Any] | None = getattr(load_user_module(path, flag), name, None)
    if not callable(function):
        raise ConfigError(f"--{flag} {value}: {path} has no function {name!r}")
    return function


def load_user_module(path: str, flag: str) -> ModuleType:
    """Run the file, once in each process. It can import other files of its folder, and what it
    imported from the original AgentRL (`original_names`).

    `flag`: the flag that has the path, for messages. Raises `ConfigError` if the file does not
    exist or raises.
    """
    file = Path(path).resolve()
    name = f"agentrl user module {file}"  # no import statement can name it
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"--{flag} {path}: there is no such Python file")
    module = module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last: none of its files takes the place of a module
    install()
    sys.modules[name] = module  # before it runs: dataclasses in it look themselves up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            f"--{flag} {path} cannot be used: {one_line(error_line(error))}{_line(error, file)}"
        ) from error
    log.info("--%s %s is loaded", flag, path)
    return module


def _line(error: BaseException, file: Path) -> str:
    """The line of the user's file that raised, in brackets; empty if unknown."""
    if isinstance(error, SyntaxError):
        return ""  # its message has the line already
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    return f" (line {frames[-1].lineno})" if frames else ""
