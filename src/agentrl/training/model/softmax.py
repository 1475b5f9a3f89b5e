"""Logprobs of given tokens, and entropies, with few passes over the logits.

Apart from the head's matrix product, logprobs cost passes over `[tokens, vocabulary]` and memory
for them. Autograd through logsumexp, gather and division makes thirteen passes and several copies.
This implementation makes five passes forward and one backward, in the memory of the logits. On a
CPU the five passes run over a few rows at a time, which stay in the cache.

The vocabulary may be split over processes. Each process has a slice of the logits, and three
numbers per token are summed over processes instead of gathering the logits.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

_ROWS_IN_CACHE = 32  # of logits, one megabyte at 8,192 words


def picked_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    entropy: bool,
    entropy_gradient: bool,
    vocabulary: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature) of `targets`, and the entropy of that distribution.

    `logits` [N, V] are overwritten: nothing else may use them or backpropagate through them.
    `targets` [N] int64, `temperatures` [N] above 0. Returns logprobs [N] float32, and with
    `entropy` the entropy [N] float32, which has a gradient only with `entropy_gradient`. The
    backward pass can run once.

    `vocabulary`: the processes that have equal slices of the logits, in order. Results are the same
    on all; each gets the gradient of its slice.
    """
    logprobs, entropies = _Picked.apply(
        logits, targets, temperatures, entropy, entropy_gradient, vocabulary
    )
    if not entropy:
        return logprobs, None
    return logprobs, entropies if entropy_gradient else entropies.detach()


class _Picked(torch.autograd.Function):
    """With z = logits / temperature, Z = sum(exp z), p = exp(z) / Z, H = log Z - sum(p z):

    d log p_t / d z_j = [j = t] - p_j        d H / d z_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        entropy: bool,
        entropy_gradient: bool,
        vocabulary: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        exponentials = logits.float()
        largest = is_mine = None
        if vocabulary is not None:
            exponentials = exponentials.clone()  # the output of tensor parallelism is not changed
            largest = logits.amax(dim=-1, keepdim=True).float()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=vocabulary)
            targets = targets - dist.get_rank(vocabulary) * logits.shape[-1]
            is_mine = (targets >= 0) & (targets < logits.shape[-1])
            targets = targets.where(is_mine, 0)
        picked, total, weighted = _exponentiate(
            exponentials, targets, temperatures, largest, entropy
        )
        if is_mine is not None:
            sums = torch.stack([picked * is_mine, total, weighted])
            dist.all_reduce(sums, group=vocabulary)
            picked, total, weighted = sums.unbind()
        log_total = total.log()
        entropies = log_total - weighted / total
        ctx.save_for_backward(
            exponentials,
            total,
            entropies,
            targets,
            temperatures,
            is_mine,  # type: ignore[arg-type]
        )
        ctx.entropy_gradient = entropy_gradient  # type: ignore[attr-defined]
        ctx.dtype = logits.dtype  # type: ignore[attr-defined]
        return picked - log_total, entropies

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        exponentials, total, entropies, targets, temperatures, is_mine = ctx.saved_tensors  # type: ignore[attr-defined]
        by_logit = grad_logprobs / temperatures
        surprise = None
        if ctx.entropy_gradient:  # type: ignore[attr-defined]
            probabilities = exponentials / total[:, None]
            surprise = torch.special.entr(probabilities) - probabilities * entropies[:, None]
            surprise *= (grad_entropy / temperatures)[:, None]
        grad = exponentials.mul_((-by_logit / total)[:, None])
        if is_mine is not None:
            by_logit = by_logit * is_mine
        grad.scatter_add_(-1, targets[:, None], by_logit[:, None])
        if surprise is not None:
            grad += surprise
        return grad.to(ctx.dtype), None, None, None, None, None  # type: ignore[attr-defined]


def _exponentiate(
    logits: Tensor, targets: Tensor, temperatures: Tensor, largest: Tensor | None, weigh: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrite the logits [N, V] by exp(z) with z = (logits - largest) / temperature.

    `largest` [N, 1]: None means the maximum of each row. Returns z at the targets, sum(exp z), and
    sum(z exp z), which is 0 without `weigh`; each [N].
    """
    picked = logits.new_empty(len(logits))
    total, weighted = torch.empty_like(picked), torch.zeros_like(picked)
    size = max(len(logits), 1) if logits.is_cuda else _ROWS_IN_CACHE
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        z = logits[rows]
        z -= z.amax(dim=-1, keepdim=True) if largest is None else largest[rows]
        z /= temperatures[rows, None]
        picked[rows] = z.gather(-1, targets[rows, None]).squeeze(-1)
        exponentials = z.exp() if weigh else z.exp_()
        total[rows] = exponentials.sum(dim=-1)
        if weigh:
            weighted[rows] = z.mul_(exponentials).sum(dim=-1)
            z.copy_(exponentials)
    return picked, total, weighted
