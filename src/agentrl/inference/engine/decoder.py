"""A decoder of Llama's shape in few operators, over the weights of a transformers model.

A step of a small model spends most of its time between operators, and transformers' modules issue
many. Here are one projection for queries, keys and values and one for gate and up, rotations from a
table, and one write to the cache. The parameters become views of the joint projections, so that
in-place weight updates reach them.

Shapes: N tokens, H query heads, K key-value heads, D head size, W wanted logits, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.inference.engine.kv_cache import KVCache, StepLayout, attend_step

_CLASSES = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
# Their rotations depend on the length of the sequence, so that no table can hold them.
_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class _Joint:
    """Linear layers that read the same input, as one. Their parameters are views of `weight`."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *layers: nn.Linear) -> "_Joint":
        """Join layers."""
        bias = None if layers[0].bias is None else _join([layer.bias for layer in layers])
        return cls(_join([layer.weight for layer in layers]), bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights. `qk_norms`: weights of the norms of query and key heads, if any."""

    input_norm: Tensor
    qkv: _Joint
    qk_norms: tuple[Tensor, Tensor] | None
    output: nn.Linear
    mlp_norm: Tensor
    gate_up: _Joint
    activation: nn.Module
    down: nn.Linear


class Decoder:
    """The forward pass of a model that `fits`."""

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        core: Any = model.model
        config = core.config
        self._cache = cache
        self._embeddings: nn.Embedding = core.embed_tokens
        self._layers = [_read_layer(layer) for layer in core.layers]
        self._norm: Tensor = core.norm.weight
        self._head: nn.Linear = model.lm_head
        self._eps: float = config.rms_norm_eps
        self._heads: int = config.num_attention_heads
        self._size: int = core.layers[0].self_attn.head_dim
        self._scaling: float = core.layers[0].self_attn.scaling
        positions = torch.arange(cache.row_length, device=self._norm.device)
        cos, sin = core.rotary_emb(self._norm, positions[None])
        # Folded into the sine: the sign that a rotation by a quarter gives to a head's first half.
        sin[..., : self._size // 2] *= -1
        self._rotations_P2D = torch.stack((cos[0], sin[0]), dim=1)

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether the model is one that this forward computes as transformers does."""
        if type(model).__name__ not in _CLASSES or not _is_of_transformers(model):
            return False
        core: Any = model.model
        if core.rotary_emb.rope_type in _ROPE_BY_LENGTH:
            return False
        # An adapter, or a quantised layer, is no plain linear layer: its weight is not all of it.
        projections = (
            module
            for layer in core.layers
            for module in layer.modules()
            if isinstance(getattr(module, "weight", None), Tensor) and module.weight.ndim > 1
        )
        return all(type(module) is nn.Linear for module in projections)

    def __call__(self, ids_N: Tensor, layout: StepLayout, wanted_W: Tensor) -> Tensor:
        """Return the logits [W, V] after the wanted tokens of a step."""
        cos, sin = self._rotations_P2D[layout.positions_N, :, None].unbind(1)  # [N, 1, D] each
        hidden = self._embeddings(ids_N)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(hidden, layer.input_norm))
            qkv_NAD = qkv.view(len(ids_N), -1, self._size)
            attended = self._attend(qkv_NAD, layer, index, layout, cos, sin)
            hidden = hidden + layer.output(attended)
            gate_up = layer.gate_up(self._normed(hidden, layer.mlp_norm))
            gate, up = gate_up.chunk(2, dim=-1)
            hidden = hidden + layer.down(layer.activation(gate) * up)
        logits_WV: Tensor = self._head(self._normed(hidden[wanted_W], self._norm))
        return logits_WV

    def _attend(
        self,
        qkv_NAD: Tensor,
        layer: _Layer,
        index: int,
        layout: StepLayout,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Attention of one layer; `qkv_NAD` has H + 2K heads. Returns [N, H * D]."""
        heads, kv = self._heads, (qkv_NAD.shape[1] - self._heads) // 2
        qk = still = qkv_NAD[:, : heads + kv]
        if layer.qk_norms is not None:
            still = torch.rms_norm(qk, (self._size,), None, self._eps)
            of_queries, of_keys = layer.qk_norms
            still[:, :heads] *= of_queries
            still[:, heads:] *= of_keys
        torch.addcmul(still * cos, still.roll(self._size // 2, -1), sin, out=qk)
        keys, values = self._cache.write(qkv_NAD[:, heads:], index, layout)
        return attend_step(qkv_NAD[:, :heads], keys, values, layout, self._scaling)

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.rms_norm(hidden, weight.shape, weight, self._eps)


def _is_of_transformers(model: PreTrainedModel) -> bool:
    return type(model).__module__.startswith("transformers.models.")


def _read_layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = hasattr(attention, "q_norm")
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=_Joint.of(attention.q_proj, attention.k_proj, attention.v_proj),
        qk_norms=(attention.q_norm.weight, attention.k_norm.weight) if norms else None,
        output=attention.o_proj,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=_Joint.of(mlp.gate_proj, mlp.up_proj),
        activation=mlp.act_fn,
        down=mlp.down_proj,
    )


@torch.no_grad()
def _join(parameters: list[Tensor]) -> Tensor:
    """Concatenate parameters, and let them be views of the result."""
    joint = torch.cat(parameters)
    parts = joint.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return joint
