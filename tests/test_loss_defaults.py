"""What the name of a loss means for flags that are not given."""

import pytest

from agentrl.configs import parse_config
from agentrl.configs.losses import LOSSES
from agentrl.launcher.presets import PRESETS, preset_flags


@pytest.mark.parametrize(
    ("loss", "advantage", "normalisation", "clip_range", "normalizes_advantages"),
    [
        ("GRPO", "mean_std", "token", (0.8, 1.2), False),
        ("Dr.GRPO", "mean", "constant", (0.8, 1.2), False),
        ("DAPO", "mean_std", "token", (0.8, 1.28), False),
        ("MINIRL", "mean", "constant", (0.8, 1.27), False),
        ("GSPO", "mean_std", "sequence", (0.9997, 1.0004), False),
        ("REINFORCE++", "score", "token", (0.8, 1.2), True),
        ("REINFORCE++-baseline", "mean", "token", (0.8, 1.2), True),
        ("RLOO", "leave_one_out", "constant", (0.8, 1.2), False),
        ("ReMax", "remax", "constant", (0.8, 1.2), False),
        ("OPO", "opo", "constant", (0.8, 1.2), False),
    ],
)
def test_one_flag_names_a_whole_algorithm(
    loss: str,
    advantage: str,
    normalisation: str,
    clip_range: tuple[float, float],
    normalizes_advantages: bool,
) -> None:
    config = parse_config(["--loss_calculator", loss])
    assert config.reward.advantage == advantage
    assert config.loss.normalisation == normalisation
    assert config.loss.clip_range == pytest.approx(clip_range)
    assert config.loss.normalizes_advantages is normalizes_advantages


def test_flags_that_are_given_go_before_those_of_the_loss() -> None:
    config = parse_config(
        ["--loss_calculator", "Dr.GRPO", "--advantage", "score", "--token_level_loss",
         "--normalize_advantages", "--epsilon_higher", "0.3"]
    )  # fmt: skip
    assert config.reward.advantage == "score"
    assert config.loss.normalisation == "token"
    assert config.loss.normalizes_advantages
    assert config.loss.clip_range == pytest.approx((0.8, 1.5))
    sequence = parse_config(["--loss_calculator", "MINIRL", "--token_level_loss", "false"])
    assert sequence.loss.normalisation == "sequence"


def test_the_example_scripts_bring_no_flag_that_another_loss_would_not_have() -> None:
    flags = preset_flags(PRESETS["grpo"], 1, demo=True)
    assert parse_config(flags).loss.clip_range == pytest.approx((0.8, 1.2))
    config = parse_config([*flags, "--loss_calculator", "RLOO"])
    assert (config.reward.advantage, config.loss.normalisation) == ("leave_one_out", "constant")


def test_skipping_the_length_normalisation_goes_before_all() -> None:
    for flags in (["--token_level_loss", "false"], []):
        config = parse_config([*flags, "--skip_length_normalization", "true"])
        assert config.loss.normalisation == "constant"


def test_the_constant_length_is_the_longest_answer_of_a_turn_unless_it_is_given() -> None:
    flags = ["--loss_calculator", "MINIRL", "--max_new_tokens", "48"]
    assert parse_config(flags).learner.loss.divisor == 48
    summed = parse_config([*flags, "--skip_length_normalization", "true"])
    assert summed.learner.loss.divisor == 1
    assert parse_config([*flags, "--normalization_length", "7"]).learner.loss.divisor == 7


@pytest.mark.parametrize(
    ("loss", "centre", "cap"),
    [
        ("GRPO", "behaviour", None),
        ("GSPO", "recompute", None),
        ("GSPO-token", "recompute", None),
        ("MINIRL", "recompute", 5.0),
    ],
)
def test_a_name_sets_the_centre_of_the_clip_range_and_the_cap_of_the_weight(
    loss: str, centre: str, cap: float | None
) -> None:
    config = parse_config(["--loss_calculator", loss]).loss
    assert (config.centre, config.weight_cap) == (centre, cap)
    given = parse_config(["--loss_calculator", loss, "--proximal_policy", "loglinear"]).loss
    assert given.centre == "loglinear"


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("loss", LOSSES)
def test_each_script_trains_with_any_loss(preset: str, loss: str) -> None:
    flags = preset_flags(PRESETS[preset], 1, demo=True)
    assert parse_config([*flags, "--loss_calculator", loss]).loss.loss_calculator == loss


def test_one_attempt_at_a_task_is_enough_where_attempts_are_not_compared() -> None:
    config = parse_config(["--loss_calculator", "REINFORCE++", "--num_generations", "1"])
    assert config.sampling.num_generations == 1
