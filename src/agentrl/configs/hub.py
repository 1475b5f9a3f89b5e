"""Models by their name on the Hugging Face hub: downloaded once, and then a folder like others.

The cache is that of huggingface_hub, and so are the variables HF_ENDPOINT, HF_TOKEN and HF_HOME.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.configs.flag import ConfigError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB = "https://huggingface.co"
# Of a repository, what a model folder needs. Weights are read from safetensors.
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_FLAGS = (
    "model_name_or_path", "reference_model_name_or_path", "critic_model_name_or_path",
)  # fmt: skip


def is_hub_name(path: str) -> bool:
    """Whether a path can be meant as a name of the hub: `organisation/model`, and no folder."""
    return bool(_HUB_NAME.fullmatch(path)) and not Path(path).parent.exists()


def model_here(path: str, given_with: str) -> str:
    """Return the folder of a model, after downloading it if `path` is a name of the hub.

    `given_with`: the flag or variable that has the name, for the message. Raises `ConfigError` if
    the hub cannot be reached or has no such model.
    """
    if not is_hub_name(path):
        return path
    # Imported here: most runs have a folder, and the package loads slowly.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    endpoint = os.environ.get("HF_ENDPOINT", _HUB).rstrip("/")
    print(f"model {path}: from {endpoint}, if it is not in the cache yet", file=sys.stderr)
    nowhere = f"{given_with} {path}: there is no such folder here"
    try:
        return str(snapshot_download(path, endpoint=endpoint, allow_patterns=_FILES))
    except GatedRepoError:
        raise ConfigError(
            f"{nowhere}, and the model at {endpoint} is given to those who ask only: ask on its "
            "page, and set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"{nowhere}, and no model of this name at {endpoint} (a private one needs HF_TOKEN)"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{nowhere}, and {endpoint} does not give a model of this name ({reason}): give the "
            f"folder of a model; `hf download {path} --local-dir FOLDER` gets it where there is a "
            "hub"
        ) from None


def with_models_here(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's flags with the folders of the models that they name by the hub's names."""
    return {
        name: model_here(value, f"--{name}") if name in _FLAGS and value is not None else value
        for name, value in values.items()
    }
