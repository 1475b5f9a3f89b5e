"""What placement knows of a model, from its config.json alone: no weights are read."""

from itertools import product

from transformers import PreTrainedModel

from agentrl.configs import Config, ConfigError
from agentrl.inference.context import read_model_limits
from agentrl.launcher.placement import Degrees, ModelSizes
from agentrl.training.model.memory_report import described_model, shape_of
from agentrl.training.model.text_sizes import TextSizes
from agentrl.training.parallel import ParallelSizes, check_degrees

_TENSOR = (1, 2, 4, 8)
_CONTEXT = (1, 2, 4, 8, 16)
_EXPERT = (1, 2, 4, 8, 16, 32, 64)


def read_sizes(config: Config) -> ModelSizes:
    """The sizes of the run's model, with its adapter. Raises `ConfigError`."""
    folder = config.model.model_name_or_path
    assert folder is not None
    return sizes_of(described_model(config), config, read_model_limits(folder).context_length)


def sizes_of(model: PreTrainedModel, config: Config, context: int | None) -> ModelSizes:
    """The sizes of a model, which may be empty."""
    sizes = TextSizes.of(model.config)
    heads, key_heads = sizes.heads, sizes.key_heads
    return ModelSizes(
        shape=shape_of(model),
        key_heads=max(key_heads, 1),
        context=context,
        degrees=frozenset(_degrees(model, config)),
        serving=frozenset(
            gpus
            for gpus in {*_TENSOR, config.services.inf_tp_size}
            if heads % gpus == 0 and (key_heads % gpus == 0 or gpus % key_heads == 0)
        ),
    )


def _degrees(model: PreTrainedModel, config: Config) -> set[Degrees]:
    """The degrees that divide the model. An adapter is not divided."""
    given = config.parallel
    whole = (1,) if config.lora.lora_rank else ()
    tensor = whole or sorted({*_TENSOR, given.tp_size})
    expert = whole or sorted({*_EXPERT, given.ep_size})
    found = set()
    for tp, cp, ep in product(tensor, sorted({*_CONTEXT, given.cp_size}), expert):
        try:
            check_degrees(model, ParallelSizes(tp=tp, cp=cp, ep=ep), given.cp_mode)
        except ConfigError:
            continue
        found.add((tp, cp, ep))
    return found
