"""Reads weights, or parts of them, from the safetensors files of a model folder.

`WeightNames` says which tensors of the files make up a weight of the model. Renaming, stacking of
experts and concatenation are supported; a folder that needs other conversions raises
`UnknownLayout`.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from agentrl.weight_names import WeightNames

_FLOATS = {"F64", "F32", "F16", "BF16"}
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2}

Window = tuple[slice, ...]
"""A part of a tensor: a slice for each dimension."""


class UnknownLayout(Exception):
    """The files do not have the model's weights in a supported layout. The message says why."""


class SafetensorsFolder:
    """The weights of a model in the safetensors files of its folder."""

    def __init__(
        self, folder: Path, model: PreTrainedModel, shapes: Mapping[str, torch.Size]
    ) -> None:
        """`shapes`: of the weights that will be read, by their names in the model.

        Raises `UnknownLayout` if not all of them can be read, `ValueError` if one has another shape
        in the files.
        """
        self._recipes = _recipes(stored_tensors(folder), model, list(shapes))
        for name, shape in shapes.items():
            if name not in self._recipes:
                raise UnknownLayout(f"its files have no {name}")
            stored = self._recipes[name].shape
            if stored != tuple(shape):
                raise ValueError(
                    f"{name} is {list(stored)} in the files and {list(shape)} in the model that "
                    "config.json describes"
                )

    def read(self, name: str, shape: torch.Size, window: Window | None) -> Tensor:
        """Read the part `window` of a weight of `shape`; all of it if None.

        The result has the files' dtype.
        """
        return self._recipes[name].read(window or tuple(slice(0, size) for size in shape))


class _Recipe(Protocol):
    """How a weight is made from tensors of the files."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, window: Window) -> Tensor: ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file. `dtype` is safetensors' name of it, such as "BF16"."""

    file: Any  # safetensors' handle
    key: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * _BYTES.get(self.dtype, 1)

    def read(self, window: Window) -> Tensor:
        part: Tensor = self.file.get_slice(self.key)[window]
        return part

    def whole(self) -> Tensor:
        """All of it."""
        tensor: Tensor = self.file.get_tensor(self.key)
        return tensor


@dataclass(frozen=True)
class _Stacked:
    """Tensors of one shape along a new first dimension: the experts of a layer."""

    parts: Sequence[_Recipe]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    def read(self, window: Window) -> Tensor:
        parts = [part.read(window[1:]) for part in self.parts[window[0]]]
        sizes = [cut.stop - cut.start for cut in window[1:]]
        return torch.stack(parts) if parts else torch.empty(0, *sizes)


@dataclass(frozen=True)
class _Concatenated:
    """Tensors one after the other along dimension `dim`."""

    parts: Sequence[_Recipe]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(shape)

    def read(self, window: Window) -> Tensor:
        cut, pieces, offset = window[self.dim], [], 0
        for part in self.parts:
            size = part.shape[self.dim]
            start, stop = max(cut.start - offset, 0), min(cut.stop - offset, size)
            offset += size
            if start < stop:
                pieces.append(
                    part.read((*window[: self.dim], slice(start, stop), *window[self.dim + 1 :]))
                )
        return (
            torch.cat(pieces, self.dim)
            if pieces
            else self.parts[0].read((*window[: self.dim], slice(0, 0), *window[self.dim + 1 :]))
        )


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the folder's files, by their names there; only the headers are read.

    Raises `UnknownLayout` if the folder has no safetensors files, or one that cannot be read.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = [SAFE_WEIGHTS_NAME]
    tensors = {}
    for name in names:
        try:
            file = safe_open(folder / name, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UnknownLayout(f"{name} cannot be read as safetensors ({error})") from None
        for key in file.keys():  # noqa: SIM118 - it is no dictionary
            stored = file.get_slice(key)
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
            tensors[key] = StoredTensor(file, key, shape, dtype)
    return tensors


def _recipes(
    tensors: Mapping[str, StoredTensor], model: PreTrainedModel, weights: Sequence[str]
) -> dict[str, _Recipe]:
    """The recipe of each weight that the files have tensors for."""
    names = WeightNames(model, weights, tensors)
    sources: defaultdict[str, defaultdict[str | None, list[StoredTensor]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for key, weight in names.places.items():
        stored = tensors[key]
        if stored.dtype not in _FLOATS:
            raise UnknownLayout(f"{key} is stored as {stored.dtype}")
        _, pattern = names.place(key)
        sources[weight][pattern].append(stored)
    return {weight: _recipe(found, names) for weight, found in sources.items()}


def _recipe(sources: Mapping[str | None, list[StoredTensor]], names: WeightNames) -> _Recipe:
    """A weight from its tensors, by the source pattern of the conversion that they matched."""
    pattern = next(iter(sources))
    if pattern is None:
        return sources[None][0]
    converter = names.converter(pattern)
    parts: list[_Recipe] = []
    for source in converter.source_patterns:
        parts += _concat(sources.get(source, []), converter)
    last = converter.operations[-1]
    if len(parts) == 1:
        return parts[0]
    if not isinstance(last, Concatenate):
        raise UnknownLayout(f"it is converted by {type(last).__name__}")
    return _Concatenated(parts, last.dim)


def _concat(stored: list[StoredTensor], converter: WeightConverter) -> list[_Recipe]:
    """Apply the converter's first operation to the tensors of one pattern."""
    for operation in converter.operations:
        stacks = isinstance(operation, MergeModulelist) and operation.dim == 0
        if not stacks and not isinstance(operation, Concatenate):
            raise UnknownLayout(f"it is converted by {type(operation).__name__}")
    if isinstance(converter.operations[0], MergeModulelist):
        return [_Stacked(stored)] if stored else []
    return list(stored)
