"""Which flags a loss uses: what is said of it, against what changes its result."""

import pytest
import torch
from loss_inputs import random_inputs
from torch import Tensor

from agentrl.configs import ConfigError, LossConfig, parse_config
from agentrl.configs.losses import LOSSES, unused_by
from agentrl.configs.training import CriticConfig
from agentrl.training.losses import BatchTotals
from agentrl.training.step.objective import Objective

RANGE = {"epsilon": 0.05, "epsilon_higher": 0.05}
RECOMPUTED = {"proximal_policy": "recompute", "rollout_is": "token"}
# A value of each flag, and the flags beside which it has an effect.
VALUES: dict[str, tuple[object, dict[str, object]]] = {
    "epsilon": (0.01, {}),
    "epsilon_higher": (0.01, {}),
    "beta1": (0.5, RANGE),
    "beta2": (0.5, RANGE),
    "dual_clip": (1.01, {}),
    "strict_in_bound": (True, RANGE),
    "proximal_policy": ("loglinear", {"rollout_rs": "token", "rollout_rs_threshold": 1.2}),
    "rollout_is": ("token", {"proximal_policy": "recompute"}),
    "rollout_rs": ("token", {}),
    "rollout_rs_threshold": (1.1, {"rollout_rs": "token"}),
    "rollout_rs_threshold_lower": (0.9, {"rollout_rs": "token"}),
    "importance_weight_cap_ratio": (1.01, RECOMPUTED),
    "out_of_date_decay": (0.5, {}),
    "normalize_advantages": (True, {}),
    "kl_in_advantage": (True, {"beta": 0.5, "kl_estimator": "k2"}),
    "sapo_temperature_pos": (3.0, {}),
    "sapo_temperature_neg": (3.0, {}),
    "clip_cov_ratio": (0.5, {"clip_cov_lb": -9.0, "clip_cov_ub": 9.0}),
    "clip_cov_lb": (0.0, {"clip_cov_ratio": 1.0}),
    "clip_cov_ub": (0.0, {"clip_cov_ratio": 1.0, "clip_cov_lb": -9.0}),
    "kl_cov_ratio": (0.5, {}),
    "ppo_kl_coef": (0.1, {"kl_cov_ratio": 0.5}),
}
# Refused although the layer would have an effect: PPO normalises its advantages in any case, and
# without advantages CrossEntropy only loses the penalty.
ELSEWHERE = {("PPO", "normalize_advantages"), ("CrossEntropy", "kl_in_advantage")}


def outcome(loss: str, flags: dict[str, object]) -> tuple[Tensor, Tensor]:
    """The loss of some rows off policy and its gradient."""
    given = random_inputs([5, 9, 4, 7, 8], seed=2)
    values = given.advantages.double()
    totals = BatchTotals(33, 5, float(values.sum()), float(values.square().sum()))
    objective = Objective(LossConfig(loss_calculator=loss, **flags))  # type: ignore[arg-type]
    share, _ = objective.share(given, totals)
    (gradient,) = torch.autograd.grad(share, given.logprobs)
    return share.detach(), gradient


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_uses_the_flags_that_it_names_and_no_other(loss: str) -> None:
    for name, (value, beside) in VALUES.items():
        if (loss, name) in ELSEWHERE:
            continue
        if name == "normalize_advantages":
            value = not LOSSES[loss].normalize_advantages
        beside = {"proximal_policy": "behaviour", **beside}
        if name == "importance_weight_cap_ratio" and LOSSES[loss].weighs_sampler:
            beside = {}
        plain, changed = outcome(loss, beside), outcome(loss, {**beside, name: value})
        same = all(torch.equal(a, b) for a, b in zip(plain, changed, strict=True))
        assert same == (name in unused_by(loss)), name


def test_every_flag_of_some_losses_is_tried() -> None:
    of_some = {name for loss in LOSSES for name in unused_by(loss)}
    assert of_some == {*VALUES, *CriticConfig.__dataclass_fields__}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--loss_calculator", "SAPO", "--beta1", "1"],
            "--beta1 1: --loss_calculator SAPO does not use it, only GRPO, Dr.GRPO, DAPO, GSPO",
        ),
        (
            ["--loss_calculator", "GRPO", "--sapo_temperature_pos", "2"],
            "--sapo_temperature_pos 2: --loss_calculator GRPO does not use it, only SAPO; "
            "leave it out",
        ),
        (["--loss_calculator", "CISPO", "--epsilon", "0.1"], "CISPO does not use it"),
        (["--loss_calculator", "GPG", "--dual_clip", "3"], "GPG does not use it"),
        (["--loss_calculator", "PPO", "--normalize_advantages"], "PPO does not use it"),
        (
            ["--loss_calculator", "MINIRL", "--gae_lambda", "0.9"],
            "MINIRL does not use it, only PPO",
        ),
        (
            ["--loss_calculator", "CrossEntropy", "--strict_in_bound", "true"],
            "--strict_in_bound true: --loss_calculator CrossEntropy does not use it",
        ),
        (["--loss_calculator", "my.py:loss", "--critic_updates", "2"], "only PPO"),
        (["--kl_estimator", "k2"], "--kl_estimator k2: has no effect without --beta"),
        (["--rollout_rs_threshold", "3"], "has no effect without --rollout_rs"),
    ],
)
def test_a_flag_without_effect_is_refused_by_name(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(flags)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags",
    [
        ["--loss_calculator", "CISPO", "--epsilon", "0.1", "--strict_in_bound", "true"],
        ["--loss_calculator", "CrossEntropy", "--strict_in_bound", "false"],
        ["--loss_calculator", "GRPO", "--sapo_temperature_pos", "1"],
        ["--loss_calculator", "my.py:loss", "--sapo_temperature_pos", "2"],
        [
            "--loss_calculater",
            "MINIRL",
            "--token_level_loss",
            "false",
            "--strict_in_bound",
            "true",
            "--skip_length_normalization",
            "true",
        ],
    ],
    ids=[
        "a bound of what is left out",
        "switched off",
        "its default",
        "a loss of the user's",
        "the flags of AgentRL's own script",
    ],
)
def test_a_flag_that_changes_nothing_or_may_be_used_is_taken(flags: list[str]) -> None:
    parse_config(flags)
