"""Where a model is: a folder on this machine. Nothing is fetched from a model hub by itself."""

import re
from pathlib import Path

from agentrl.configs.flag import ConfigError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def model_folder(path: str, given_with: str) -> Path:
    """The folder at `path`.

    `given_with`: the flag or variable that named it. Raises `ConfigError`, which says how to get a
    folder, if there is none.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(
            f"{given_with} {path}: is a file; a model is the folder that holds its config.json"
        )
    missing = f"{given_with} {path}: there is no such folder"
    if _HUB_NAME.fullmatch(path) and not folder.parent.exists():
        raise ConfigError(
            f"{missing}, and models are not downloaded by name: get it with "
            f"`hf download {path} --local-dir models/{folder.name}` and give models/{folder.name}"
        )
    where = "" if folder.is_absolute() else f" in {Path.cwd()}"
    raise ConfigError(
        f"{missing}{where}: give the folder of a Hugging Face model, the one with its config.json "
        "(`hf download NAME --local-dir FOLDER` gets one)"
    )
