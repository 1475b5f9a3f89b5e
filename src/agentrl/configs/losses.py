"""The losses by name: the function of each, and its defaults for other flags.

A published algorithm is a loss function with a clip range, a length normalisation and an advantage.
`--loss_calculator` selects all of them; each also has its own flag, which takes precedence. The
functions are in `training/losses/`, with their sources. A new loss is a file there and a line in
`LOSSES`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

ADVANTAGES = ("mean_std", "mean", "leave_one_out", "remax", "opo", "score")
NORMALISATIONS = ("token", "sequence", "none")
PROXIMAL_POLICIES = ("behaviour", "recompute", "loglinear")
RATIO_LEVELS = ("token", "sequence", "geometric")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")


@dataclass(frozen=True)
class LossDefaults:
    """The function of a loss and the defaults that it sets.

    function: `file.function` in `agentrl/training/losses/`, as text, because `configs` does not
        import torch

    The other fields are the defaults of the flags of the same names. `normalisation` is that of
    `--token_level_loss` and `--skip_length_normalization`.
    """

    function: str = "clipped.clipped_surrogate"
    advantage: str = "mean_std"
    normalisation: str = "token"
    epsilon: float = 0.2
    epsilon_higher: float | None = None  # None: the value of `epsilon`
    normalize_advantages: bool = False
    # Properties of the function, without a flag:
    clips: bool = True  # tokens outside the clip range lose gradient, which --beta1 can keep
    has_ratio: bool = True  # the function has an importance ratio; --rollout_is would be a second


LOSSES: Mapping[str, LossDefaults] = {
    "GRPO": LossDefaults(),
    "Dr.GRPO": LossDefaults(advantage="mean", normalisation="none"),
    "DAPO": LossDefaults(epsilon_higher=0.28),
    "GSPO": LossDefaults(
        "clipped.gspo", normalisation="sequence", epsilon=3e-4, epsilon_higher=4e-4
    ),
    "GSPO-token": LossDefaults(
        "clipped.gspo_token", normalisation="sequence", epsilon=3e-4, epsilon_higher=4e-4
    ),
    "CISPO": LossDefaults("weighted.cispo", epsilon_higher=4.0, clips=False),
    # Without division by the standard deviation or the length, the sum over tokens equals the
    # sequence's reward to first order.
    "MINIRL": LossDefaults(
        "weighted.minirl", advantage="mean", normalisation="none", epsilon_higher=0.27
    ),
    "SAPO": LossDefaults("weighted.sapo", normalisation="sequence", clips=False),
    "REINFORCE++": LossDefaults(advantage="score", normalize_advantages=True),
    "REINFORCE++-baseline": LossDefaults(advantage="mean", normalize_advantages=True),
    "RLOO": LossDefaults(
        "weighted.reinforce", advantage="leave_one_out", normalisation="none", clips=False
    ),
    "ReMax": LossDefaults(
        "weighted.reinforce", advantage="remax", normalisation="none", clips=False
    ),
    "OPO": LossDefaults("weighted.reinforce", advantage="opo", normalisation="none", clips=False),
    "GPG": LossDefaults("weighted.gpg", advantage="mean", clips=False, has_ratio=False),
    "Clip-Cov": LossDefaults("covariance.clip_cov"),
    "KL-Cov": LossDefaults("covariance.kl_cov", clips=False),
    "PPO": LossDefaults(advantage="score"),
    "CrossEntropy": LossDefaults("supervised.cross_entropy", clips=False),
}


def loss_defaults(loss: str) -> LossDefaults:
    """Return the defaults of a loss; those of GRPO for a loss in a user's file."""
    return LOSSES.get(loss, LossDefaults())
