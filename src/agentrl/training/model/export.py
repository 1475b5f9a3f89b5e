"""`agentrl export`: writes a checkpoint of any number of processes as a Hugging Face folder.

One process exports one file of weights at a time, so that the model may be larger than memory.
Optimizer state is not read. Only merging an adapter needs the whole model in memory.
"""

import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from agentrl.configs import ConfigError, LoraConfig, ModelConfig
from agentrl.configs.verbs import export_parser
from agentrl.training.checkpoint.layout import CheckpointError, list_checkpoints, read_state
from agentrl.training.checkpoint.save import failure_reason
from agentrl.training.model.lora import add_adapter, is_adapter_weight, save_adapter
from agentrl.training.model.model_folder import (
    ModelFolderError,
    check_model_folder,
    load_model,
    load_tokenizer,
    whole_weights,
    written_at_once,
)

FILE_BYTES = 4 << 30  # largest size of a file, unless one layer is larger
_LAYER = re.compile(r".*?\.\d+\.")

# Reads weights by their names in the model.
Reader = Callable[[Sequence[str]], dict[str, Tensor]]


def export_checkpoint(
    checkpoint_dir: Path, model_dir: Path, out_dir: Path, file_bytes: int = FILE_BYTES
) -> None:
    """Write the weights of a checkpoint to `out_dir`, in files of up to `file_bytes`.

    `model_dir` is the folder that the run started from; it gives config, tokenizer and dtype.
    `out_dir` is written atomically. Raises `CheckpointError`, `ConfigError` or `ModelFolderError`.
    """
    lora = LoraConfig(**read_state(checkpoint_dir).config.get("lora", {}))
    check_model_folder(str(model_dir))
    _check_new(out_dir)
    disable_progress_bar()
    tokenizer = load_tokenizer(str(model_dir))
    config = AutoConfig.from_pretrained(model_dir)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shapes = {
        name: weight
        for name, weight in model.state_dict().items()
        if name not in model.all_tied_weights_keys
    }
    read = (
        _merged(checkpoint_dir, model_dir, lora, dtype)
        if lora.lora_rank
        else _stored(checkpoint_dir, model_dir, shapes)
    )
    files = plan_files({name: weight.nbytes for name, weight in shapes.items()}, file_bytes)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with written_at_once(out_dir) as folder:
        _write_weights(folder, model, files, read)
        config.save_pretrained(folder)
        if (model_dir / "generation_config.json").is_file():
            shutil.copy(model_dir / "generation_config.json", folder)
        tokenizer.save_pretrained(folder)


def export_adapter(checkpoint_dir: Path, model_dir: Path, out_dir: Path) -> None:
    """Write only the adapter of a checkpoint, as a PEFT folder.

    Raises the errors of `export_checkpoint`, and `ConfigError` if the checkpoint has no adapter.
    """
    lora = LoraConfig(**read_state(checkpoint_dir).config.get("lora", {}))
    check_model_folder(str(model_dir))
    if not lora.lora_rank:
        raise ConfigError(
            f"--adapter: {checkpoint_dir} was trained without --lora_rank and holds no adapter"
        )
    _check_new(out_dir)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
    add_adapter(model, lora, frozen_dtype=torch.float32)
    weights = {
        name: torch.empty_like(value, device="cpu")
        for name, value in model.state_dict().items()
        if is_adapter_weight(name)
    }
    _load(weights, checkpoint_dir, model_dir)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with written_at_once(out_dir) as folder:
        save_adapter(weights, lora, model_dir, folder)
        load_tokenizer(str(model_dir)).save_pretrained(folder)


def plan_files(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Divide weights into files of up to `limit` bytes, in the order of `sizes`.

    The weights of a layer are in one file, because experts are one tensor in memory and several on
    disk. A layer above `limit` has a separate file.
    """
    layers: dict[str, list[str]] = {}
    for name in sizes:
        match = _LAYER.match(name)
        layers.setdefault(match[0] if match else name, []).append(name)
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


def _check_new(out_dir: Path) -> None:
    if out_dir.exists():
        raise ConfigError(f"{out_dir} exists already: remove it, or export to another folder")


def _stored(checkpoint_dir: Path, model_dir: Path, shapes: Mapping[str, Tensor]) -> Reader:
    """Reads weights of the checkpoint, in the dtype of `shapes`."""

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        weights = {name: torch.empty_like(shapes[name], device="cpu") for name in names}
        _load(weights, checkpoint_dir, model_dir)
        return weights

    return read


def _merged(checkpoint_dir: Path, model_dir: Path, lora: LoraConfig, dtype: torch.dtype) -> Reader:
    """Reads weights of the start model with the checkpoint's adapter merged into them."""
    model = load_model(ModelConfig(model_name_or_path=str(model_dir)))
    add_adapter(model, lora, frozen_dtype=torch.float32)
    adapter = {name: value for name, value in model.state_dict().items() if is_adapter_weight(name)}
    _load(adapter, checkpoint_dir, model_dir)
    merged = {name: weight.to(dtype) for name, weight in whole_weights(model)}
    return lambda names: {name: merged[name] for name in names}


def _load(weights: dict[str, Tensor], checkpoint_dir: Path, model_dir: Path) -> None:
    """Fill `weights` in place."""
    try:
        with warnings.catch_warnings():
            # that one process loads it, which is what is wanted
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load({"model": weights}, checkpoint_id=checkpoint_dir, no_dist=True)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint_dir} does not hold the weights of {model_dir}: "
            f"{failure_reason(error)}"
        ) from error


def _write_weights(
    folder: Path, model: PreTrainedModel, files: Sequence[Sequence[str]], read: Reader
) -> None:
    """One safetensors file for each of `files`, and the index if there are several."""
    index: dict[str, str] = {}
    total = 0
    for number, names in enumerate(files, start=1):
        several = f"-{number:05}-of-{len(files):05}" if len(files) > 1 else ""
        file = f"model{several}.safetensors"
        # by the names and in the pieces that such a model has on disk
        weights = revert_weight_conversion(model, read(names))
        index |= dict.fromkeys(weights, file)
        total += sum(weight.nbytes for weight in weights.values())
        contiguous = {name: weight.contiguous() for name, weight in weights.items()}
        save_file(contiguous, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")


def main(argv: Sequence[str]) -> int:
    """`agentrl export CHECKPOINT OUT [--model_name_or_path FOLDER] [--adapter]`.

    Returns the exit status.
    """
    arguments = export_parser().parse(argv).own
    export = export_adapter if arguments.adapter else export_checkpoint
    checkpoints = list_checkpoints(arguments.checkpoint)
    checkpoint = checkpoints[-1] if checkpoints else arguments.checkpoint
    try:
        recorded = read_state(checkpoint).config["model"]["model_name_or_path"]
        export(checkpoint, Path(arguments.model_name_or_path or recorded), arguments.out)
    except (CheckpointError, ConfigError, ModelFolderError) as error:
        print(f"agentrl export: {error}", file=sys.stderr)
        return 2
    print(f"wrote {arguments.out}")
    return 0
