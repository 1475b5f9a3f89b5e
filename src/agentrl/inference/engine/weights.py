"""In-place weight updates of a live model. A folder is loaded completely or not at all."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel


class WeightsError(ValueError):
    """A folder does not hold this model's weights."""


class CacheNotFlushed(WeightsError):
    """The weights are loaded, but running or waiting requests prevent flushing the old cache."""


def read_weights(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """Read and validate the folder's tensors on the CPU, by the model's names.

    A tensor may be missing only if it is tied to one that is present. Raises WeightsError for the
    first mistake. The model does not change.
    """
    state = model.state_dict(keep_vars=True)
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118  (not a mapping)
                    tensors[name] = reader.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read weights from {file}: {error}") from error
    check_weights(model, tensors, str(folder))
    given = {state[name].data_ptr() for name in tensors}
    missing = [name for name, tensor in state.items() if tensor.data_ptr() not in given]
    if missing:
        raise WeightsError(f"{folder} lacks {len(missing)} tensors, for instance {missing[0]!r}")
    return tensors


def check_weights(model: PreTrainedModel, tensors: dict[str, Tensor], source: str) -> None:
    """Raise WeightsError for the first tensor whose name, shape or dtype does not fit the model."""
    state = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        if name not in state:
            raise WeightsError(f"{source} has {name!r}, which the served model has not")
        if tensor.shape != state[name].shape:
            raise WeightsError(
                f"{source}: {name} has shape {list(tensor.shape)},"
                f" the served model's is {list(state[name].shape)}"
            )
        if not tensor.is_floating_point():
            raise WeightsError(f"{source}: {name} is {tensor.dtype}, not floating point")


@torch.no_grad()
def copy_weights(model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    """Copy validated tensors into the model, cast to its dtype and device."""
    state = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        state[name].copy_(tensor)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise WeightsError(f"{folder} has neither {single.name} nor {index.name}")
    return [single]
