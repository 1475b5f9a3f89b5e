"""Writes weights as the safetensors files of a model folder, one file in memory at a time."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

FILE_BYTES = 4 << 30  # largest size of a file, unless one layer is larger
_LAYER = re.compile(r".*?\.\d+\.")


def layer_of(name: str) -> str:
    """What the names of a layer's weights begin with; the name itself outside of layers."""
    match = _LAYER.match(name)
    return match[0] if match else name


def plan_files(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Divide weights into files of up to `limit` bytes, in the order of `sizes`.

    The weights of a layer are in one file, because experts are one tensor in memory and several on
    disk. A layer above `limit` has a separate file.
    """
    layers: dict[str, list[str]] = {}
    for name in sizes:
        layers.setdefault(layer_of(name), []).append(name)
    files: list[list[str]] = []
    room = 0
    for names in layers.values():
        size = sum(sizes[name] for name in names)
        if not files or size > room:
            files.append([])
            room = limit
        files[-1] += names
        room -= size
    return files


def write_files(folder: Path, files: Iterable[Mapping[str, Tensor]], count: int) -> None:
    """Write `count` files with the tensors of `files`, and the index if there are several."""
    index: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(files, start=1):
        name = SAFE_WEIGHTS_NAME
        if count > 1:
            name = name.replace(".safetensors", f"-{number:05}-of-{count:05}.safetensors")
        index |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(contiguous, folder / name, metadata={"format": "pt"})
    if count > 1:
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(content, indent=2) + "\n")
