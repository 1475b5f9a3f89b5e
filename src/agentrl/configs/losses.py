"""The losses by name, and what each name means for flags that are not given.

A published algorithm is more than a loss function: a clip range, a length normalisation, an
advantage. One flag, `--loss_calculator`, names them all together; each can be given by its own flag
nevertheless. The functions themselves are the trainer's and the samplers', and so are the sources.
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
    """What a loss is, and what flags stand at with it if they are not given.

    The first fields are flags of the same names, except `normalisation`, which is
    `--token_level_loss` and `--skip_length_normalization`.
    """

    advantage: str = "mean_std"
    normalisation: str = "token"
    epsilon: float = 0.2
    epsilon_higher: float | None = None  # None: as `epsilon`
    normalize_advantages: bool = False
    # Of the function itself, for which there is no flag:
    clips: bool = True  # its clip range takes gradient away
    has_ratio: bool = True  # it has an importance ratio: a weight does not come twice


LOSSES: Mapping[str, LossDefaults] = {
    "GRPO": LossDefaults(),
    "Dr.GRPO": LossDefaults(advantage="mean", normalisation="none"),
    "DAPO": LossDefaults(epsilon_higher=0.28),
    "GSPO": LossDefaults(normalisation="sequence", epsilon=3e-4, epsilon_higher=4e-4),
    "GSPO-token": LossDefaults(normalisation="sequence", epsilon=3e-4, epsilon_higher=4e-4),
    "CISPO": LossDefaults(epsilon_higher=4.0, clips=False),
    # Without division by the deviation or by the length, the token sum is to first order the
    # sequence's reward.
    "MINIRL": LossDefaults(advantage="mean", normalisation="none", epsilon_higher=0.27),
    "SAPO": LossDefaults(normalisation="sequence", clips=False),
    "REINFORCE++": LossDefaults(advantage="score", normalize_advantages=True),
    "REINFORCE++-baseline": LossDefaults(advantage="mean", normalize_advantages=True),
    "RLOO": LossDefaults(advantage="leave_one_out", normalisation="none", clips=False),
    "ReMax": LossDefaults(advantage="remax", normalisation="none", clips=False),
    "OPO": LossDefaults(advantage="opo", normalisation="none", clips=False),
    "GPG": LossDefaults(advantage="mean", clips=False, has_ratio=False),
    "Clip-Cov": LossDefaults(),
    "KL-Cov": LossDefaults(clips=False),
    "PPO": LossDefaults(advantage="score"),
    "CrossEntropy": LossDefaults(clips=False),
}


def loss_defaults(loss: str) -> LossDefaults:
    """Those of a loss; of one in a user's file, GRPO's."""
    return LOSSES.get(loss, LossDefaults())
