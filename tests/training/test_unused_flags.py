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

RANGE = {"epsilon": 0.05, "clip_ratio_high": 0.05}
RECOMPUTED = {"proximal_policy": "recompute", "rollout_is": "token"}
# A value of each flag, and the flags beside which it has an effect.
VALUES: dict[str, tuple[object, dict[str, object]]] = {
    "epsilon": (0.01, {}),
    "epsilon_higher": (0.5, {}),
    "clip_ratio_high": (0.01, {}),
    "beta1": (0.5, RANGE),
    "beta2": (0.5, RANGE),
    "dual_clip": (1.01, {}),
    "strict_in_bound": (True, RANGE),
    "proximal_policy": ("loglinear", {"rollout_rs": "token", "rollout_rs_threshold": 1.2}),
    "rollout_is": ("token", {"proximal_policy": "recompute"}),
    "rollout_rs": ("token", {}),
    "rollout_rs_threshold": (1.1, {"rollout_rs": "token"}),
    "rollout_rs_threshold_lower": (0.9, {"rollout_rs": "token"}),
    "rollout_is_threshold": (1.01, RECOMPUTED),
    "importance_weight_cap_ratio": (1.01, RANGE),
    "out_of_date_decay": (0.5, {**RANGE, "importance_weight_cap_ratio": 6.0}),
    "advantage_decay": (0.5, {}),
    "normalize_advantages": (True, {}),
    "kl_in_advantage": (True, {"beta": 0.5, "kl_estimator": "k1"}),
    "sapo_temperature_pos": (3.0, {}),
    "sapo_temperature_neg": (3.0, {}),
    "clip_cov_ratio": (0.5, {"clip_cov_lb": -9.0, "clip_cov_ub": 9.0}),
    "clip_cov_lb": (0.0, {"clip_cov_ratio": 1.0}),
    "clip_cov_ub": (0.0, {"clip_cov_ratio": 1.0, "clip_cov_lb": -9.0}),
    "kl_cov_ratio": (0.5, {}),
    "ppo_kl_coef": (0.1, {"kl_cov_ratio": 0.5}),
}
# Refused although the flag would have an effect: PPO normalises its advantages in any case, without
# advantages CrossEntropy only loses the penalty, and CISPO has no epsilon to which more is added.
ELSEWHERE = {
    ("PPO", "normalize_advantages"),
    ("CrossEntropy", "kl_in_advantage"),
    ("CISPO", "epsilon_higher"),
}


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
        if name == "rollout_is_threshold" and LOSSES[loss].weighs_sampler:
            beside = {}
        if name == "strict_in_bound" and LOSSES[loss].weighs_sampler:
            beside = RANGE  # it is the centre of that range
        if name == "importance_weight_cap_ratio" and LOSSES[loss].weighs_sampler:
            value = 8.0  # its band is the clip range already
        plain, changed = outcome(loss, beside), outcome(loss, {**beside, name: value})
        same = all(torch.equal(a, b) for a, b in zip(plain, changed, strict=True))
        assert same == (name in unused_by(loss)), name


OF_A_RATIO = (
    "epsilon", "epsilon_higher", "clip_ratio_high", "beta1", "beta2", "dual_clip",
    "strict_in_bound", "importance_weight_cap_ratio", "sapo_temperature_pos",
    "sapo_temperature_neg",
)  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_around_a_recomputed_policy_the_flags_that_change_no_gradient_are_refused(
    loss: str,
) -> None:
    if loss in ("KL-Cov", "CrossEntropy"):  # refused with the policy; without a ratio at all
        return
    recompute = {"proximal_policy": "recompute"}
    for name in OF_A_RATIO:
        if name in unused_by(loss):
            continue
        value = VALUES[name][0]
        _, plain = outcome(loss, recompute)
        _, changed = outcome(loss, {**recompute, name: value})
        flags = ["--loss_calculator", loss, "--proximal_policy", "recompute", f"--{name}"]
        try:
            parse_config([*flags, str(value).lower()])
        except ConfigError as error:
            assert (
                f"--{name} {f'{value:g}' if value is not True else 'true'}: has no effect with"
                in str(error)
            )
            assert torch.allclose(plain, changed, atol=1e-7), name
        else:
            assert not torch.allclose(plain, changed, atol=1e-7), name


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
        (
            ["--loss_calculator", "MINIRL", "--epsilon", "0.1"],
            "--epsilon 0.1: has no effect with --proximal_policy recompute (the default of MINIRL),"
            " where the ratio is always 1; leave it out, or give --proximal_policy behaviour or "
            "--strict_in_bound true too",
        ),
        (
            ["--loss_calculator", "GSPO", "--beta1", "1"],
            "recompute (the default of GSPO), where the ratio is always 1; leave it out, or give "
            "--proximal_policy behaviour too",
        ),
        (
            ["--loss_calculator", "MINIRL", "--strict_in_bound", "--proximal_policy", "recompute"],
            "--strict_in_bound true: has no effect with --proximal_policy recompute, where",
        ),
        (
            ["--loss_calculator", "KL-Cov", "--proximal_policy", "recompute"],
            "--proximal_policy recompute with --loss_calculator KL-Cov: its penalty |log r|",
        ),
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
        ["--loss_calculator", "MINIRL", "--strict_in_bound", "--proximal_policy", "loglinear"],
        ["--loss_calculator", "CrossEntropy", "--strict_in_bound", "false"],
        ["--loss_calculator", "GRPO", "--sapo_temperature_pos", "1"],
        ["--loss_calculator", "my.py:loss", "--sapo_temperature_pos", "2"],
        ["--loss_calculator", "my.py:loss", "--proximal_policy", "recompute", "--epsilon", "0.1"],
        ["--loss_calculator", "MINIRL", "--dual_clip", "3"],
        ["--loss_calculator", "MINIRL", "--strict_in_bound", "true", "--epsilon", "0.1"],
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
        "a mask around another policy",
        "switched off",
        "its default",
        "a loss of the user's",
        "the range of a user's loss",
        "a cap of the weight to the sampler",
        "the range of a mask around the sampler",
        "the flags of AgentRL's own script",
    ],
)
def test_a_flag_that_changes_nothing_or_may_be_used_is_taken(flags: list[str]) -> None:
    parse_config(flags)
