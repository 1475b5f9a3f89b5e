"""Logprobs of picked tokens and entropies, from logits, with as few passes over them as it takes.

Beside the head's own matrices, passes over `[tokens, vocabulary]` are what logprobs cost, and new
memory for them. Autograd through logsumexp, gather and division makes thirteen and keeps several
copies; here it is five forward and one backward, all in the memory of the logits.

The vocabulary may be split over processes. Each then has its slice of the logits, and three numbers
a token are summed over them instead of the logits gathered.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx


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

    `logits` [N, V], which are overwritten: nothing else may use their values, or gradients of what
    was computed from them. `targets` [N] int64, `temperatures` [N] above 0. Returns logprobs [N]
    float32, and entropy [N] float32 if asked for, which carries a gradient only with
    `entropy_gradient`. The backward pass can run once.

    `vocabulary`: processes that have equal slices of the logits, in their order; the results are
    the same on all, and backward each gets the gradient of its slice.
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
        shifted = logits.float()
        largest = shifted.amax(dim=-1, keepdim=True)
        is_mine = None
        if vocabulary is None:
            shifted.sub_(largest)
        else:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=vocabulary)
            shifted = shifted - largest  # what tensor parallelism gives must not be written over
            targets = targets - dist.get_rank(vocabulary) * logits.shape[-1]
            is_mine = (targets >= 0) & (targets < logits.shape[-1])
            targets = targets.where(is_mine, 0)
        shifted.div_(temperatures[:, None])
        picked = shifted.gather(-1, targets[:, None]).squeeze(-1)
        exponentials = torch.exp(shifted) if entropy else shifted.exp_()
        total = exponentials.sum(dim=-1)
        weighted = (
            torch.linalg.vecdot(exponentials, shifted) if entropy else torch.zeros_like(total)
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
