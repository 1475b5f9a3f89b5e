"""`agentrl export`: writes a checkpoint of any number of processes as a Hugging Face folder.

One process exports one file of weights at a time, so that the model may be larger than memory.
Optimizer state is not read. Only merging an adapter needs the whole model in memory.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
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
from agentrl.training.model.weight_files import FILE_BYTES, plan_files
from agentrl.training.model.written_form import WrittenForm, written_form

log = logging.getLogger(__name__)

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
    stated = config.dtype or config.get_text_config().dtype
    dtype = stated if isinstance(stated, torch.dtype) else torch.float32
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.name_or_path = str(model_dir)
    form = written_form(model)
    shapes = {
        name: weight.to(form.dtype(name, dtype))
        for name, weight in model.state_dict().items()
        if name not in model.all_tied_weights_keys
    }
    read = (
        _merged(checkpoint_dir, model_dir, lora, form, dtype)
        if lora.lora_rank
        else _stored(checkpoint_dir, model_dir, shapes)
    )
    files = plan_files({name: weight.nbytes for name, weight in shapes.items()}, file_bytes)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    tensors = (form.names.to_folder(read(names)) for names in files)
    with written_at_once(out_dir) as folder:
        form.write(folder, tensors, len(files), tokenizer, dtype)


def export_adapter(checkpoint_dir: Path, model_dir: Path, out_dir: Path) -> None:
    """Write only the adapter of a checkpoint, as a PEFT folder; warns if PEFT loads it wrongly.

    Raises the errors of `export_checkpoint`, and `ConfigError` if the checkpoint has no adapter.
    """
    lora = LoraConfig(**read_state(checkpoint_dir).config.get("lora", {}))
    check_model_folder(str(model_dir))
    if not lora.lora_rank:
        raise ConfigError(
            f"--adapter: {checkpoint_dir} was trained without --lora_rank and holds no adapter"
        )
    _check_new(out_dir)

    def make_model() -> PreTrainedModel:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(model_dir)
            )
        return model

    model = make_model()
    add_adapter(model, lora, frozen_dtype=torch.float32)
    weights = {
        name: torch.empty_like(value, device="cpu")
        for name, value in model.state_dict().items()
        if is_adapter_weight(name)
    }
    _load(weights, checkpoint_dir, model_dir)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with written_at_once(out_dir) as folder:
        right = save_adapter(weights, lora, model_dir, folder, make_model)
        load_tokenizer(str(model_dir)).save_pretrained(folder)
    if not right:
        log.warning(
            "PEFT %s adapts other layers of this model than were trained, so that it loads %s "
            "wrongly: export the merged model (without --adapter)",
            version("peft"),
            out_dir,
        )


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


def _merged(
    checkpoint_dir: Path, model_dir: Path, lora: LoraConfig, form: WrittenForm, dtype: torch.dtype
) -> Reader:
    """Reads weights of the start model with the checkpoint's adapter merged into them."""
    model = load_model(ModelConfig(model_name_or_path=str(model_dir)))
    add_adapter(model, lora, frozen_dtype=torch.float32)
    adapter = {name: value for name, value in model.state_dict().items() if is_adapter_weight(name)}
    _load(adapter, checkpoint_dir, model_dir)
    merged = {name: weight.to(form.dtype(name, dtype)) for name, weight in whole_weights(model)}
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
