"""`agentrl export`: a checkpoint as a Hugging Face folder."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from agentrl.configs import ConfigError, LoraConfig, ModelConfig
from agentrl.training.checkpoint import CheckpointError, list_checkpoints, read_state
from agentrl.training.lora import add_adapter, is_adapter_weight
from agentrl.training.model_folder import (
    ModelFolderError,
    check_model_folder,
    load_model,
    load_tokenizer,
    save_model_folder,
    whole_weights,
)


def export_checkpoint(checkpoint_dir: Path, model_dir: Path, out_dir: Path) -> None:
    """Write the weights of a checkpoint to `out_dir`, in one process, whatever saved them.

    `model_dir` is the folder that the run started from: its config, its tokenizer and the dtype
    of its weights are kept. `out_dir` appears when it is complete. Raises `CheckpointError`,
    `ConfigError` or `ModelFolderError`.
    """
    recorded = read_state(checkpoint_dir).config
    check_model_folder(str(model_dir))
    if out_dir.exists():
        raise ConfigError(f"{out_dir} exists already: remove it, or export to another folder")
    disable_progress_bar()
    config = AutoConfig.from_pretrained(model_dir)
    lora = LoraConfig(**recorded.get("lora", {}))
    model: PreTrainedModel
    if lora.lora_rank:
        model = load_model(ModelConfig(model_name_or_path=str(model_dir)))
        add_adapter(model, lora, frozen_dtype=torch.float32)
        weights = {n: value for n, value in model.state_dict().items() if is_adapter_weight(n)}
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        weights = model.state_dict()
    try:
        with warnings.catch_warnings():
            # that one process loads it, which is what is wanted
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load({"model": weights}, checkpoint_id=checkpoint_dir, no_dist=True)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint_dir} does not hold the weights of {model_dir}: {error}"
        ) from error
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    whole = dict(whole_weights(model))
    save_model_folder(model, load_tokenizer(str(model_dir)), whole, out_dir, dtype)


def main(argv: Sequence[str]) -> int:
    """`agentrl export CHECKPOINT OUT [--model_name_or_path FOLDER]`; returns the exit status."""
    parser = argparse.ArgumentParser("agentrl export", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "checkpoint", type=Path, help="checkpoint-N folder, or a run's folder for its last one"
    )
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument(
        "--model_name_or_path", help="model that the run started from (default: as recorded)"
    )
    arguments = parser.parse_args(argv)
    checkpoints = list_checkpoints(arguments.checkpoint)
    checkpoint = checkpoints[-1] if checkpoints else arguments.checkpoint
    try:
        recorded = read_state(checkpoint).config["model"]["model_name_or_path"]
        export_checkpoint(checkpoint, Path(arguments.model_name_or_path or recorded), arguments.out)
    except (CheckpointError, ConfigError, ModelFolderError) as error:
        print(f"agentrl export: {error}", file=sys.stderr)
        return 2
    print(f"wrote {arguments.out}")
    return 0
