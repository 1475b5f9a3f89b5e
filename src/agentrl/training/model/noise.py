"""A model without its random parts: dropout, dropped layers, and the jitter of routers.

A policy's ratio compares its logprobs with those that the engine sampled with. Random parts, which
the model's configuration may ask for in training, would change the ratio of each token.
"""

import re
from collections.abc import Iterator
from types import MethodType

from torch.nn import Module
from torch.nn.modules.dropout import _DropoutNd
from transformers import PhimoeConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

# transformers' names: attention_dropout, resid_pdrop, drop_path_rate, layerdrop, jitter_noise.
_PROBABILITY = re.compile(r"drop(out|_prob|_path|_rate)|pdrop|layerdrop|jitter")
# Phi-3.5-MoE's mixer tells by it which experts share a token, in evaluation too. In training it
# draws them at random, whatever its value is.
_OF_MIXER = "router_jitter_noise"


def remove_noise(model: PreTrainedModel) -> list[str]:
    """Set each probability of dropout to 0 in place, and each router's jitter.

    Returns the names of those in the model's configuration that were not 0, sorted.
    """
    configs = list(_configs(model.config))
    configured = {name for config in configs for name in _probabilities(config)}
    # Modules have copies of the values, or read them from a configuration in each pass.
    for owner in (*configs, *model.modules()):
        for name in _probabilities(owner):
            setattr(owner, name, 0.0)
        if isinstance(owner, _DropoutNd):
            owner.p = 0.0
        if isinstance(owner, PhimoeTopKRouter):
            _keep_in_evaluation(owner)
    return sorted(configured)


def _keep_in_evaluation(module: Module) -> None:
    module.eval()
    module.train = MethodType(lambda self, mode=True: self, module)  # type: ignore[method-assign]


def _probabilities(owner: object) -> list[str]:
    """The names of its probabilities of dropout, and of its jitter, that are not 0."""
    kept = _OF_MIXER if isinstance(owner, PhimoeConfig | PhimoeTopKRouter) else None
    return [
        name
        for name, value in vars(owner).items()
        if isinstance(value, float) and value and _PROBABILITY.search(name) and name != kept
    ]


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration and those that it contains."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _configs(value)
