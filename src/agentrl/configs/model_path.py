"""Checks that a path is a model folder on this machine, or a name of the hub, which becomes one.

A run's checkpoint or a PEFT adapter is recognised; the error says how to make a model folder of it.
"""

import json
from pathlib import Path

from agentrl.configs.flag import ConfigError
from agentrl.configs.hub import model_here

CONFIG_FILE = "config.json"


def model_folder(path: str, given_with: str) -> Path:
    """Return the model folder at `path`, or that of a name of the hub.

    `given_with`: the flag or variable that has the path, for the message. Raises `ConfigError` if
    the path is no folder with a config.json.
    """
    folder = Path(model_here(path, given_with))
    if (folder / CONFIG_FILE).is_file():
        return folder
    if folder.is_dir():
        raise ConfigError(f"{given_with} {path}: {_what_else(folder)}")
    if folder.exists():
        raise ConfigError(
            f"{given_with} {path}: is a file; a model is the folder that holds its config.json"
        )
    where = "" if folder.is_absolute() else f" in {Path.cwd()}"
    raise ConfigError(
        f"{given_with} {path}: there is no such folder{where}: give the folder of a Hugging Face "
        "model, the one with its config.json, or the name of one, as organisation/model"
    )


def trainable_folder(path: str, given_with: str) -> Path:
    """Return the model folder at `path`, as `model_folder` does.

    Raises `ConfigError` also if its weights are quantised: a service that serves such a folder
    cannot take the trained weights, which are not.
    """
    folder = model_folder(path, given_with)
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError:
        return folder  # whoever loads it says what is wrong
    kind = (config.get("quantization_config") or {}).get("quant_method")
    if kind is not None:
        raise ConfigError(
            f"{given_with} {path}: its weights are quantised ({kind}), and a service of this "
            "folder could not take trained weights: give a folder of the model in bfloat16 "
            "(docs/reference/models.md tells how to make one)"
        )
    return folder


def _what_else(folder: Path) -> str:
    """Describe a folder without config.json, and what to give instead."""
    if any(folder.glob("*.distcp")):
        return (
            f"is a checkpoint of a run, which holds sharded weights; `agentrl export {folder} "
            "FOLDER` writes it as a model, and FOLDER is to be given"
        )
    if any(folder.glob("checkpoint-*/*.distcp")):
        return (
            f"is the folder of a run; `agentrl export {folder} FOLDER` writes its last checkpoint "
            "as a model, and FOLDER is to be given"
        )
    if (folder / "adapter_config.json").is_file():
        return (
            "is an adapter of PEFT without its model; merge the two "
            "(`PeftModel.merge_and_unload`, `save_pretrained`) and give that folder"
        )
    inside = next(iter(sorted(folder.glob(f"*/{CONFIG_FILE}"))), None)
    if inside is not None:
        return f"has no {CONFIG_FILE}, but {inside.parent} has: give that folder"
    return f"has no {CONFIG_FILE}: give the folder of a Hugging Face model, the one that has"
