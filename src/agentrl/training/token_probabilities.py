"""From logits to the logprob and the entropy of a token, in as few passes over them as can be.

Where the vocabulary is large and the model small these passes cost as much as layers do. Written
out they take less than half the time of autograd's. Not in here: the head that makes the logits
(`logprobs`).
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_probabilities(
    logits_NV: Tensor, targets: Tensor, temperatures: Tensor, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Of softmax(logits / temperature): the targets' logprobs [N], and its entropy [N] if asked.

    `targets` and `temperatures`: [N]. Both results are float32 and have a gradient by the logits.
    """
    logprobs, entropy = _TokenProbabilities.apply(logits_NV, targets, temperatures, with_entropy)  # type: ignore[no-untyped-call]
    return cast(Tensor, logprobs), cast(Tensor | None, entropy)


class _TokenProbabilities(torch.autograd.Function):
    """With x = logits / temperature, m = max x, p = softmax(x) and log z = m - log(max p):

        logprob = x_target - log z        d logprob / d x = 1_target - p
        entropy = log z - sum(p x)        d entropy / d x = -p (log p + entropy)

    Only p is kept of what is as large as the logits, and the gradient is written over it.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperatures: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        scale = temperatures.float().reciprocal()[:, None]
        scaled = logits.float() * scale
        probabilities = torch.softmax(scaled, dim=-1)
        log_z = scaled.amax(dim=-1) - probabilities.amax(dim=-1).log()
        logprobs = scaled.gather(-1, targets[:, None]).squeeze(-1) - log_z
        # written over: a new tensor of this size costs more than what is computed in it
        entropy = log_z - scaled.mul_(probabilities).sum(dim=-1) if with_entropy else None
        ctx.save_for_backward(probabilities, targets, scale, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        probabilities, targets, scale, entropy = ctx.saved_tensors
        if by_entropy is None:
            if by_logprob is None:
                return None, None, None, None
            gradient = probabilities.mul_(-by_logprob[:, None] * scale)
        else:
            gradient = torch.xlogy(probabilities, probabilities)
            gradient.addcmul_(probabilities, entropy[:, None]).mul_(-by_entropy[:, None] * scale)
            if by_logprob is not None:
                gradient.addcmul_(probabilities, -by_logprob[:, None] * scale)
        if by_logprob is not None:
            gradient.scatter_add_(-1, targets[:, None], by_logprob[:, None] * scale)
        return gradient, None, None, None
