"""Floating-point operations of a forward and backward pass, by tokens.

The planner balances ranks with it, and benchmarks compute bounds of speed-ups.
"""

from dataclasses import dataclass

from transformers import PreTrainedModel


@dataclass(frozen=True)
class FlopsModel:
    """Operations of one unit of each kind of work, forward and backward.

    A matrix of n weights takes 2n for a token, and twice that again backward. A query and a key
    that it sees take 4 d forward (their score, and the value's share in the output), and 10 d
    backward with flash attention, which computes the score again; d: width of all heads together.
    Recomputed activations and the head's recomputed chunks are left out: they scale with these.
    """

    token: float  # through all layers, without attention's scores
    pair: float  # a query and a key that it sees, in all layers
    prediction: float  # a hidden state through the head

    @classmethod
    def of(cls, model: PreTrainedModel) -> "FlopsModel":
        """The costs of `model`. A mixture of experts counts only the active experts."""
        config = model.config.get_text_config()
        outside = {id(model.get_input_embeddings().weight)}
        head = model.get_output_embeddings()
        if head is not None:
            outside.add(id(head.weight))
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        active = config.num_experts_per_tok / experts if experts else 1.0
        weights = 0.0
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and id(parameter) not in outside:
                weights += parameter.numel() * (active if ".experts." in name else 1.0)
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        return cls(
            token=6.0 * weights,
            pair=14.0 * width * config.num_hidden_layers,
            prediction=6.0 * config.hidden_size * config.vocab_size,
        )

    def total(self, tokens: float, pairs: float, predictions: float) -> float:
        """Total operations for these numbers of tokens, pairs and predictions."""
        return tokens * self.token + pairs * self.pair + predictions * self.prediction
