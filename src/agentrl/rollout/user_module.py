"""A user's own Python file, run for what it registers: agents, scorers."""

import logging
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from agentrl.configs import ConfigError

log = logging.getLogger(__name__)


def load_user_module(path: str, flag: str) -> None:
    """Run the file once in this process.

    `flag`: the one that named it, for messages. Raises `ConfigError` if there is no such file or
    it raises.
    """
    file = Path(path).resolve()
    name = f"agentrl user module {file}"  # not importable by chance
    if name in sys.modules:
        return
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"--{flag} {path}: there is no such Python file")
    module = module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses in it look themselves up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(
            f"--{flag} {path} cannot be used: {type(error).__name__}: {error}{_line(error, file)}"
        ) from error
    log.info("--%s %s is loaded", flag, path)


def _line(error: Exception, file: Path) -> str:
    """Where in the user's file the error arose."""
    if isinstance(error, SyntaxError):
        return ""  # its message has the line already
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    return f" (line {frames[-1].lineno})" if frames else ""
