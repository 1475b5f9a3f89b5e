"""How a model is written: as the folder that it comes from.

Publications and exports have that folder's names and pieces, its configuration, its dtypes, and
what it holds beside the trained model, such as a vision tower or layers that predict several
tokens. A service that loads the one folder can therefore load the other.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
)

from agentrl.training.model.lora import base_name, is_adapter_weight
from agentrl.training.model.safetensors_folder import StoredTensor, UnknownLayout, stored_tensors
from agentrl.training.model.weight_files import FILE_BYTES, plan_files, write_files
from agentrl.weight_names import WeightNames

_HALF = {"BF16", "F16"}
_COPIED = (
    GENERATION_CONFIG_NAME, PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME,
)  # fmt: skip


@dataclass(frozen=True)
class WrittenForm:
    """The form of one model.

    config: of the model, if it comes from no folder
    folder: the folder that it comes from
    float32: the model's weights that are float32 in the folder, beside others in 16 bits
    beside: the folder's tensors that belong to no weight of the model
    """

    names: WeightNames
    config: PreTrainedConfig
    folder: Path | None = None
    float32: frozenset[str] = frozenset()
    beside: Mapping[str, StoredTensor] = field(default_factory=dict)

    def dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a weight of a model that is written in `dtype`."""
        return torch.float32 if name in self.float32 else dtype

    def write_config(self, path: Path, dtype: torch.dtype) -> None:
        """Write the files that describe a model, but for its tokenizer, into the folder `path`."""
        if self.folder is None:
            self.config.save_pretrained(path)
        else:
            shutil.copy(self.folder / CONFIG_NAME, path)
            for name in _COPIED:
                if (self.folder / name).is_file():
                    shutil.copy(self.folder / name, path)
        file = path / CONFIG_NAME
        config = json.loads(file.read_text(encoding="utf-8"))
        _set_dtype(config, str(dtype).removeprefix("torch."))
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def write(
        self,
        path: Path,
        files: Iterator[Mapping[str, Tensor]],
        count: int,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype,
    ) -> None:
        """Fill the folder `path` with `count` files of weights and all that belongs to them.

        `files`: tensors by their names in a folder. What lies beside the model is added.
        """
        sizes = {name: stored.nbytes for name, stored in self.beside.items()}
        rest = plan_files(sizes, FILE_BYTES)

        def every() -> Iterator[Mapping[str, Tensor]]:
            yield from files
            for names in rest:
                yield {name: self.beside[name].whole() for name in names}

        write_files(path, every(), count + len(rest))
        self.write_config(path, dtype)
        tokenizer.save_pretrained(path)


def written_form(model: PreTrainedModel) -> WrittenForm:
    """The form of a model, which may be sharded, empty or have an adapter."""
    weights = [base_name(name) for name in model.state_dict() if not is_adapter_weight(name)]
    folder = Path(model.name_or_path) if model.name_or_path else None
    if folder is None or not (folder / CONFIG_NAME).is_file():
        return WrittenForm(WeightNames(model, weights), model.config)
    try:
        stored = stored_tensors(folder)
    except UnknownLayout:
        return WrittenForm(WeightNames(model, weights), model.config, folder)
    names = WeightNames(model, weights, stored)
    mixed = any(tensor.dtype in _HALF for tensor in stored.values())
    wide = {place for key, place in names.places.items() if stored[key].dtype == "F32"}
    return WrittenForm(
        names,
        model.config,
        folder,
        frozenset(wide if mixed else ()),
        {key: stored[key] for key in names.beside},
    )


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """State `dtype` in a configuration and in its parts that state one."""
    for part in config.values():
        if isinstance(part, dict) and {"dtype", "torch_dtype"} & part.keys():
            _set_dtype(part, dtype)
    config.pop("torch_dtype", None)  # the name that transformers 4 had
    config["dtype"] = dtype
