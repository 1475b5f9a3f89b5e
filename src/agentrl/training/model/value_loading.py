"""Loads the critic's model from a folder: made empty, sharded, filled, like the policy.

    empty_value_model -> prepare_model -> fill_value_model

To transformers a critic is a token classifier with one label, so its folders load there too.
"""

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedModel

from agentrl.configs import ConfigError, ModelConfig
from agentrl.training.model.loading import fill
from agentrl.training.model.model_folder import check_model_folder, first_attention
from agentrl.training.model.value_head import HEADS, has_value_head
from agentrl.training.parallel import Mesh

FLAG = "--critic_model_name_or_path"
_KIND = "ForTokenClassification"


def empty_value_model(config: ModelConfig) -> PreTrainedModel:
    """Make the folder's model with a value head, its parameters on the meta device.

    `fill_value_model` gives it weights. Raises `ConfigError`.
    """
    folder = check_model_folder(config.model_name_or_path, FLAG)
    try:
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForTokenClassification.from_config(
                AutoConfig.from_pretrained(folder, num_labels=1),
                dtype=torch.float32,
                attn_implementation=first_attention(config),
            )
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{FLAG} {folder}: no critic can be made of it ({reason})") from None
    if not has_value_head(model):
        raise ConfigError(
            f"{FLAG} {folder}: {type(model).__name__} has no head of a known name "
            f"({', '.join(HEADS)}), so it cannot be a critic: give another model"
        )
    return model


def fill_value_model(
    model: PreTrainedModel, config: ModelConfig, mesh: Mesh, device: torch.device
) -> None:
    """Load the weights of its folder into a sharded `empty_value_model`, in place.

    If the folder has no value head, the head starts at 0, so that the first values are 0 and the
    first advantages are those without a critic. `device`: where the shards are. Collective. Raises
    `ConfigError`.
    """
    folder = check_model_folder(config.model_name_or_path, FLAG)
    kinds = AutoConfig.from_pretrained(folder).architectures or []
    zeros: set[str] = set()
    if not any(kind.endswith(_KIND) for kind in kinds):
        zeros = {name for name, _ in model.named_parameters() if name.split(".")[0] in HEADS}
    fill(model, config, mesh, device, zeros=zeros, load=_load_whole)


def _load_whole(config: ModelConfig) -> PreTrainedModel:
    folder = check_model_folder(config.model_name_or_path, FLAG)
    try:
        model: PreTrainedModel = AutoModelForTokenClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float32
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{FLAG} {folder}: the critic cannot be loaded ({reason})") from None
    return model
