"""Floating-point operations of a forward and backward pass, by tokens, and their share of a peak.

The planner balances ranks with it, and benchmarks compute bounds of speed-ups and utilisation.
"""

from dataclasses import dataclass

from transformers import PreTrainedModel

from agentrl.training.model.text_sizes import TextSizes

_PAIR, _PAIR_ONCE = 14.0, 12.0  # operations of a pair, with and without the score computed again

# Dense bfloat16 operations a second, by a part of what a device calls itself (NVIDIA's data
# sheets). The first that fits counts.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,  # GH200 too
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}


def peak_flops(device: str) -> float | None:
    """Dense bfloat16 operations a second of the device of that name; None if it is not known."""
    return next((flops for known, flops in PEAK_FLOPS.items() if known in device), None)


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
        sizes = TextSizes.of(model.config)
        outside = {id(model.get_input_embeddings().weight)}
        head = model.get_output_embeddings()
        if head is not None:
            outside.add(id(head.weight))
        active = sizes.experts_per_token / sizes.experts if sizes.experts else 1.0
        weights = 0.0
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and id(parameter) not in outside:
                weights += parameter.numel() * (active if ".experts." in name else 1.0)
        return cls(
            token=6.0 * weights,
            pair=_PAIR * sizes.heads * sizes.head_dim * sizes.layers,
            prediction=6.0 * sizes.hidden * sizes.vocabulary,
        )

    def total(self, tokens: float, pairs: float, predictions: float) -> float:
        """Total operations for these numbers of tokens, pairs and predictions."""
        return tokens * self.token + pairs * self.pair + predictions * self.prediction

    def mfu(
        self, tokens: float, pairs: float, predictions: float, seconds: float, peak: float
    ) -> float:
        """Model FLOPs utilisation: the share of `peak`, in operations a second, that was used.

        What is computed again does not count, neither activations nor flash attention's score
        (PaLM, arXiv 2204.02311, appendix B); masked pairs are not `pairs`.
        """
        again = pairs * self.pair * (1 - _PAIR_ONCE / _PAIR)
        return (self.total(tokens, pairs, predictions) - again) / seconds / peak
