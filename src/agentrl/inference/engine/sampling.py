"""Sampling parameters, and sampling of tokens with their logprobs from a batch of logits.

Logprobs are log_softmax(logits / temperature) after penalties. As in SGLang, top_k, top_p and min_p
restrict which tokens can be drawn and do not change the logprobs. Shapes: B rows, V ids.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_GREEDY_BELOW = 1e-6
# Beyond these the logits leave the range of floats, and no token could be drawn for a whole batch.
_TEMPERATURE_UP_TO = 1e4
_REPETITION_FROM, _REPETITION_UP_TO = 0.01, 2.0


@dataclass(frozen=True, slots=True)
class TokenSampling:
    """Sampling parameters of one request. `checked` turns temperature 0 into `greedy`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    seed: int | None = None
    greedy: bool = False

    @property
    def filters(self) -> bool:
        """Whether top_k, top_p or min_p exclude tokens."""
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def edits_logits(self) -> bool:
        """Whether the logits depend on earlier tokens (penalties, `min_new_tokens`)."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or self.min_new_tokens > 0
        )

    def for_copy(self, copy: int) -> "TokenSampling":
        """The parameters of another of `n` generations of a prompt, with another seed."""
        return self if self.seed is None else replace(self, seed=hash((self.seed, copy)))

    def checked(self) -> "TokenSampling":
        """The parameters with `greedy` set for temperature 0 or top_k 1.

        Raises ValueError for a value out of range.
        """
        if not 0.0 <= self.temperature <= _TEMPERATURE_UP_TO:
            raise ValueError(
                f"temperature must be in [0, {_TEMPERATURE_UP_TO:g}], got {self.temperature}."
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}.")
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k must be -1 (disable) or at least 1, got {self.top_k}.")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name} must be in [-2, 2], got {getattr(self, name)}.")
        if not _REPETITION_FROM <= self.repetition_penalty <= _REPETITION_UP_TO:
            raise ValueError(
                f"repetition_penalty must be in [{_REPETITION_FROM}, {_REPETITION_UP_TO:g}],"
                f" got {self.repetition_penalty}."
            )
        if self.min_new_tokens < 0:
            raise ValueError(f"min_new_tokens must be at least 0, got {self.min_new_tokens}.")
        if self.temperature >= _GREEDY_BELOW and self.top_k != 1:
            return self
        return replace(
            self,
            temperature=self.temperature if self.temperature >= _GREEDY_BELOW else 1.0,
            greedy=True,
        )


def seeded_uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the seed and the output position only."""
    return random.Random(f"{seed}:{position}").random()


def edit_logits(
    logits_V: Tensor,
    sampling: TokenSampling,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    end_ids: Sequence[int],
) -> None:
    """Apply one request's penalties to its logits [V], in place.

    Presence and frequency penalties count output tokens; the repetition penalty counts prompt and
    output. Before `min_new_tokens` the `end_ids` get logit -inf.
    """
    if sampling.repetition_penalty != 1.0:
        seen = logits_V.new_tensor([*prompt_ids, *output_ids], dtype=torch.long).unique()
        values = logits_V[seen]
        logits_V[seen] = torch.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    if output_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = logits_V.new_tensor(output_ids, dtype=torch.long).unique(return_counts=True)
        logits_V[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if len(output_ids) < sampling.min_new_tokens and end_ids:
        logits_V[list(end_ids)] = float("-inf")


def sample(
    logits_BV: Tensor,
    samplings: Sequence[TokenSampling],
    seeded: Sequence[tuple[int, float]],
    generator: torch.Generator,
) -> tuple[list[int], list[float]]:
    """Draw one token per row. Returns the tokens and their logprobs, each of length B.

    `seeded` replaces the uniform numbers of some rows: (row, number in [0, 1)). Tokens are drawn
    by inverting the cumulative distribution with one uniform number per row: noise for every id of
    the vocabulary would cost more than the forward pass of a small model. Raises ValueError for
    logits that are no numbers.
    """
    device = logits_BV.device
    first = samplings[0].temperature
    if any(s.temperature != first for s in samplings):
        temperatures = torch.tensor([s.temperature for s in samplings], device=device)
        logprobs_BV = (logits_BV.float() / temperatures[:, None]).log_softmax(-1)
    else:
        logprobs_BV = (logits_BV.float() / first).log_softmax(-1)
    probs_BV = logprobs_BV.exp().double()
    if any(s.filters for s in samplings):
        probs_BV = _keep_allowed(probs_BV, samplings)
    uniform = torch.rand(len(samplings), 1, dtype=torch.double, generator=generator)
    for row, number in seeded:
        uniform[row] = number
    # A target in (0, total] guarantees that an id reaches it and that its probability is not 0.
    cdf_BV = probs_BV.cumsum(-1)
    total = cdf_BV[:, -1:]
    if not total.isfinite().all():
        raise ValueError("the model's logits are no numbers: its weights are damaged")
    target = (1.0 - uniform.to(device)) * total
    tokens_B1 = torch.searchsorted(cdf_BV, target)
    if any(s.greedy for s in samplings):
        greedy = torch.tensor([s.greedy for s in samplings], device=device)[:, None]
        tokens_B1 = torch.where(greedy, logprobs_BV.argmax(-1, keepdim=True), tokens_B1)
    chosen = logprobs_BV.gather(-1, tokens_B1)
    return tokens_B1.flatten().tolist(), chosen.flatten().tolist()


def _keep_allowed(probs_BV: Tensor, samplings: Sequence[TokenSampling]) -> Tensor:
    """Set the probability of tokens that top_k, top_p or min_p exclude to 0, float [B, V].

    Each limit applies to the unfiltered distribution.
    """
    device, vocab = probs_BV.device, probs_BV.shape[-1]
    most = [min(s.top_k, vocab) if s.top_k > 0 else vocab for s in samplings]
    top_k = torch.tensor(most, device=device)
    top_p = torch.tensor([s.top_p for s in samplings], device=device, dtype=torch.double)
    min_p = torch.tensor([s.min_p for s in samplings], device=device, dtype=torch.double)
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    drop_BV = torch.arange(vocab, device=device) >= top_k[:, None]
    # At top_p 1 a rounding error of the sum must not drop the tail.
    drop_BV |= (before_BV > top_p[:, None]) & (top_p[:, None] < 1.0)
    drop_BV |= sorted_BV < min_p[:, None] * sorted_BV[:, :1]
    kept_BV = sorted_BV.masked_fill(drop_BV, 0.0)
    return torch.zeros_like(probs_BV).scatter_(-1, order_BV, kept_BV)
