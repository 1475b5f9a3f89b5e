"""The critic's model from a model folder: made empty, sharded, filled, as the policy is.

    empty_value_model -> prepare_model -> fill_value_model

A critic is a token classifier of one label to transformers: its folders load as such elsewhere too.
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
    """The folder's model with a value head, its parameters on the meta device.

    As `loading.empty_model`, and as that to be filled. Raises `ConfigError`.
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
    """Give a sharded `empty_value_model` the weights of its folder; in place.

    A folder of a language model has no value head: it then starts as 0, so that the first values
    are 0 and the first advantages those without a critic. A folder that a critic was saved to keeps
    its own. `device`: where the shards live. Collective. Raises `ConfigError`.
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
