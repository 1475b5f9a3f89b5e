"""Estimates of a KL divergence from logprobs of sampled tokens.

Schulman, Approximating KL Divergence (joschu.net/blog/kl-approx.html), and for what their gradients
are, arXiv 2506.09477.
"""

from torch import Tensor

from agentrl.training.losses.ratio import bounded_exp


def kl_divergence(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """An estimate of KL(pi || reference) at each token [N], with d = log pi - log reference:

        k1  = d                   unbiased, of high variance, of either sign
        k2  = d^2 / 2             biased, its gradient is that of the divergence on policy
        k3  = exp(-d) - 1 + d     unbiased, never negative: GRPO's, arXiv 2402.03300, equation 4
        abs = |d|

    As a loss, k1 has a gradient of mean 0 on policy. In the advantage (`--kl_in_advantage`) it is
    the only one whose expected gradient is that of the divergence: of the others, which are least
    at d = 0, a token that the policy has made rarer is penalised, and so made rarer still.
    """
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "abs":
        return difference.abs()
    assert estimator == "k3", estimator
    return bounded_exp(-difference) - 1.0 + difference
