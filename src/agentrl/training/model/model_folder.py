"""Hugging Face model folders: read at the start of a run, written for services and users."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from agentrl.configs import TREE_ATTENTION, ConfigError, ModelConfig, trainable_folder
from agentrl.training.model.lora import (
    adapter_of,
    adapter_scaling,
    base_name,
    is_adapter_weight,
    merge,
)
from agentrl.training.model.weight_files import FILE_BYTES, plan_files
from agentrl.training.model.written_form import WrittenForm

FLAG = "--model_name_or_path"


class ModelFolderError(RuntimeError):
    """A model folder cannot be written. The message is one sentence for the user."""


def check_model_folder(path: str | None, flag: str = FLAG) -> Path:
    """Return the path of a model folder. Raises `ConfigError` if it is none to train."""
    if path is None:
        raise ConfigError(f"{flag} is needed: the folder of the model")
    return trainable_folder(path, flag)


def load_tokenizer(path: str | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer. Raises `ConfigError` if the folder has none with a chat template."""
    folder = check_model_folder(path)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{FLAG} {path}: its tokenizer cannot be loaded ({reason})") from None
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"{FLAG} {path}: its tokenizer has no chat template, which conversations with tools "
            "need: add chat_template.jinja to the folder"
        )
    return tokenizer


def load_model(config: ModelConfig) -> PreTrainedModel:
    """Load the model with float32 master weights on the CPU. Raises `ConfigError`."""
    folder = check_model_folder(config.model_name_or_path)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=first_attention(config),
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{FLAG} {config.model_name_or_path}: the model cannot be loaded ({reason})"
        ) from None
    return model


def first_attention(config: ModelConfig) -> str | None:
    """The attention to make a model with; None: what transformers chooses for it.

    `use_tree_attention` switches to tree attention later.
    """
    attention = config.attention_implementation
    return None if attention == TREE_ATTENTION else attention


def whole_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model that is not sharded, one by one.

    A tied weight is yielded once, under its first name. An adapter is merged into its layer.
    """
    state: dict[str, Tensor] = model.state_dict()
    tied, scaling = model.all_tied_weights_keys, adapter_scaling(model)
    for name, value in state.items():
        if name in tied or is_adapter_weight(name):
            continue
        adapter = adapter_of(name)
        if adapter is not None:
            a, b = (state[part] for part in adapter)
            value = merge(value, a, b, scaling)
        yield base_name(name), value


def save_model_folder(
    form: WrittenForm,
    tokenizer: PreTrainedTokenizerBase,
    weights: Mapping[str, Tensor],
    path: Path,
    dtype: torch.dtype,
) -> None:
    """Write a folder with `weights`, which a `WeightGatherer` gathered in `dtype`, atomically.

    Raises `ModelFolderError` if the folder cannot be written.
    """
    files = plan_files({name: weight.nbytes for name, weight in weights.items()}, FILE_BYTES)
    tensors = ({name: weights[name] for name in names} for names in files)
    with written_at_once(path) as folder:
        form.write(folder, tensors, len(files), tokenizer, dtype)


@contextmanager
def written_at_once(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `path` when the block ends.

    Files get the usual permissions; safetensors makes files that only their owner can read. Raises
    `ModelFolderError` if the folder cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        ordinary = partial.stat().st_mode & 0o666
        for file in partial.iterdir():
            file.chmod(ordinary)
        if path.exists():
            shutil.rmtree(path)
        os.rename(partial, path)
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(f"weights cannot be written to {path}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
