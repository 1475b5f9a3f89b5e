"""In-place weight updates of a live model. A folder is loaded completely or not at all."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.inference.engine.assembly import WeightAssembly, WeightsError
from agentrl.weight_names import WeightNames


class CacheNotFlushed(WeightsError):
    """The weights are loaded, but running or waiting requests prevent flushing the old cache."""


def make_assembly(model: PreTrainedModel, folder: Path) -> WeightAssembly:
    """Make the assembly of a model that was loaded from `folder`.

    What this folder has beside the model, other folders and publications may have too.
    """
    state = model.state_dict()
    try:
        stored = [name for file in _weight_files(folder) for name in _names_in(file)]
    except WeightsError:
        stored = []  # it was loaded from files of another format
    return WeightAssembly(model, WeightNames(model, state, stored).beside)


def read_weights(
    model: PreTrainedModel, assembly: WeightAssembly, folder: Path
) -> dict[str, Tensor]:
    """Read and validate the folder's tensors on the CPU, by the model's names.

    A tensor may be missing only if it is tied to one that is present. Raises WeightsError for the
    first mistake. The model does not change.
    """
    state = model.state_dict(keep_vars=True)
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        with _opened(file) as reader:
            for name in reader.keys():  # noqa: SIM118  (not a mapping)
                tensors[name] = reader.get_tensor(name)
    update = assembly.begin()
    weights = update.add(tensors, str(folder))
    update.end()
    given = {state[name].data_ptr() for name in weights}
    missing = [name for name, tensor in state.items() if tensor.data_ptr() not in given]
    if missing:
        raise WeightsError(f"{folder} lacks {len(missing)} tensors, for instance {missing[0]!r}")
    return weights


@torch.no_grad()
def copy_weights(model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    """Copy validated tensors into the model, cast to its dtype and device."""
    state = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        state[name].copy_(tensor)


def _names_in(file: Path) -> list[str]:
    with _opened(file) as reader:
        return list(reader.keys())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A file of weights. Raises WeightsError if it cannot be read."""
    try:
        with safe_open(file, framework="pt") as reader:
            yield reader
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot read weights from {file}: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise WeightsError(f"{folder} has neither {single.name} nor {index.name}")
    return [single]
