"""The losses by name: the function of each, its defaults for other flags, and the flags it uses.

A published algorithm is a loss function with a clip range, a length normalisation and an advantage.
`--loss_calculator` selects all of them; each also has its own flag, which takes precedence. The
functions are in `training/losses/`, with their sources. A new loss is a file there and a line in
`LOSSES`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

ADVANTAGES = (
    "mean_std", "mean", "leave_one_out", "leave_one_out_clipped", "remax", "opo", "score",
)  # fmt: skip
NORMALISATIONS = ("token", "sequence", "constant")
PROXIMAL_POLICIES = ("behaviour", "recompute", "loglinear")
RATIO_LEVELS = ("token", "sequence", "geometric")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")

# Flags that only some losses use, in the groups that losses share.
_LAYERS = (
    "proximal_policy", "rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold",
    "rollout_rs_threshold_lower", "advantage_decay", "normalize_advantages", "kl_in_advantage",
)  # fmt: skip
_RATIO = (*_LAYERS, "dual_clip")
_RANGE = (
    *_RATIO, "epsilon", "epsilon_higher", "clip_ratio_high", "importance_weight_cap_ratio",
    "out_of_date_decay", "strict_in_bound",
)  # fmt: skip
_CLIP = (*_RANGE, "beta1", "beta2")
_CRITIC = (
    "critic_model_name_or_path", "critic_learning_rate", "critic_updates", "critic_warmup_steps",
    "gae_gamma", "gae_lambda", "value_clip",
)  # fmt: skip


@dataclass(frozen=True)
class LossDefaults:
    """The function of a loss, the defaults that it sets, and the flags that it uses.

    function: `file.function` in `agentrl/training/losses/`, as text, because `configs` does not
        import torch
    uses: of the flags that only some losses use, those that this one uses

    The other fields are the defaults of the flags of the same names. `normalisation` is that of
    `--token_level_loss` and `--skip_length_normalization`.
    """

    function: str = "clipped.clipped_surrogate"
    advantage: str = "mean_std"
    normalisation: str = "token"
    epsilon: float = 0.2
    clip_ratio_high: float | None = None  # None: the value of `epsilon`
    strict_in_bound: bool = False
    proximal_policy: str = "behaviour"
    rollout_is_threshold: float = 0.0
    normalize_advantages: bool = False
    uses: tuple[str, ...] = _CLIP
    # Properties of the function, without a flag:
    has_ratio: bool = True  # the function has an importance ratio; --rollout_is would be a second
    weighs_sampler: bool = False  # that ratio is pi / mu, whatever the proximal policy is
    # The KL that --kl_in_advantage takes off a token's advantage: that of the token, of the whole
    # sequence, or of the sequence from the token on.
    kl_span: Literal["token", "sequence", "rest"] = "token"


_REINFORCE = LossDefaults(
    "weighted.reinforce", normalisation="constant", uses=_RATIO, kl_span="sequence"
)
# The ratio of a sequence to its sampler's policy is rarely within 4e-4 of 1 because of rounding
# alone: around that policy, the range would clip most sequences that are on policy.
_GSPO = LossDefaults(
    "clipped.gspo", normalisation="sequence", epsilon=3e-4, clip_ratio_high=4e-4,
    proximal_policy="recompute", kl_span="sequence",
)  # fmt: skip

LOSSES: Mapping[str, LossDefaults] = {
    # The mean over all tokens of a step, as most trainers have it. The paper (arXiv 2402.03300,
    # equation 3) has the mean of each sequence first, which is `--token_level_loss false`.
    "GRPO": LossDefaults(),
    "Dr.GRPO": LossDefaults(advantage="mean", normalisation="constant"),
    "DAPO": LossDefaults(clip_ratio_high=0.28),
    "GSPO": _GSPO,
    "GSPO-token": replace(_GSPO, function="clipped.gspo_token", kl_span="token"),
    "CISPO": LossDefaults("weighted.cispo", clip_ratio_high=4.0, uses=(*_RATIO, "clip_ratio_high")),
    # Without division by the standard deviation or by the own length, the sum over tokens is the
    # sequence's reward to first order, times a constant. The weight is truncated as in the paper.
    "MINIRL": LossDefaults(
        "weighted.minirl",
        advantage="mean",
        normalisation="constant",
        clip_ratio_high=0.27,
        strict_in_bound=True,
        proximal_policy="recompute",
        rollout_is_threshold=5.0,
        uses=_RANGE,
        weighs_sampler=True,
    ),
    "SAPO": LossDefaults(
        "weighted.sapo",
        normalisation="sequence",
        uses=(*_RATIO, "sapo_temperature_pos", "sapo_temperature_neg"),
    ),
    "REINFORCE++": LossDefaults(advantage="score", normalize_advantages=True, kl_span="rest"),
    "REINFORCE++-baseline": LossDefaults(
        advantage="mean", normalize_advantages=True, kl_span="rest"
    ),
    "RLOO": replace(_REINFORCE, advantage="leave_one_out"),
    "ReMax": replace(_REINFORCE, advantage="remax"),
    "OPO": replace(_REINFORCE, advantage="opo"),
    "GPG": LossDefaults("weighted.gpg", advantage="mean", uses=_LAYERS, has_ratio=False),
    "Clip-Cov": LossDefaults(
        "covariance.clip_cov", uses=(*_CLIP, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")
    ),
    "KL-Cov": LossDefaults("covariance.kl_cov", uses=(*_RATIO, "kl_cov_ratio", "ppo_kl_coef")),
    "PPO": LossDefaults(
        advantage="score",
        uses=(*(flag for flag in _CLIP if flag != "normalize_advantages"), *_CRITIC),
    ),
    "CrossEntropy": LossDefaults("supervised.cross_entropy", uses=()),
}
_OF_SOME = frozenset(flag for loss in LOSSES.values() for flag in loss.uses)
# What a loss in a user's file uses is not known; it has no critic.
_OF_A_FILE = LossDefaults(uses=tuple(sorted(_OF_SOME.difference(_CRITIC))))


def loss_defaults(loss: str) -> LossDefaults:
    """Return the defaults of a loss; those of GRPO for a loss in a user's file."""
    return LOSSES.get(loss, _OF_A_FILE)


def unused_by(loss: str) -> Mapping[str, tuple[str, ...]]:
    """Return the flags that a loss does not use, each with the names of the losses that do."""
    return {
        flag: tuple(name for name, other in LOSSES.items() if flag in other.uses)
        for flag in sorted(_OF_SOME.difference(loss_defaults(loss).uses))
    }
