"""What placement knows of models in the shape of Qwen3: 0.6B, 8B and 32B."""

from itertools import product

from agentrl.launcher.placement import ModelSizes
from agentrl.training.model.memory_model import ModelShape

DEGREES = frozenset(product((1, 2, 4, 8), (1, 2, 4, 8), (1,)))


def dense(hidden: int, layers: int, intermediate: int, key: int = 1024) -> ModelSizes:
    """A model in the shape of Qwen3."""
    query = 2 * hidden if hidden < 2048 else hidden
    layer = hidden * (2 * query + 2 * key + 3 * intermediate)
    root = 2 * 151936 * hidden
    shape = ModelShape(
        hidden, layers, query, key, intermediate, 151936, layer, root, layer, root,
        query_key_norm=True,
    )  # fmt: skip
    return ModelSizes(shape, key // 128, 40960, DEGREES, frozenset((1, 2, 4, 8)))


SMALL, MIDDLE, LARGE = dense(1024, 28, 3072), dense(4096, 36, 12288), dense(5120, 64, 25600)
