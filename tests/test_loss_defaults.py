"""What the name of a loss means for flags that are not given."""

import pytest

from agentrl.configs import parse_config
from agentrl.launcher.presets import PRESETS, preset_flags


@pytest.mark.parametrize(
    ("loss", "advantage", "normalisation", "clip_range", "normalizes_advantages"),
    [
        ("GRPO", "mean_std", "token", (0.8, 1.2), False),
        ("Dr.GRPO", "mean", "none", (0.8, 1.2), False),
        ("DAPO", "mean_std", "token", (0.8, 1.28), False),
        ("MINIRL", "mean", "none", (0.8, 1.27), False),
        ("GSPO", "mean_std", "sequence", (0.9997, 1.0004), False),
        ("REINFORCE++", "score", "token", (0.8, 1.2), True),
        ("REINFORCE++-baseline", "mean", "token", (0.8, 1.2), True),
        ("RLOO", "leave_one_out", "none", (0.8, 1.2), False),
        ("ReMax", "remax", "none", (0.8, 1.2), False),
        ("OPO", "opo", "none", (0.8, 1.2), False),
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
        ["--loss_calculator", "RLOO", "--advantage", "mean", "--token_level_loss",
         "--normalize_advantages", "--epsilon_higher", "0.5"]
    )  # fmt: skip
    assert config.reward.advantage == "mean"
    assert config.loss.normalisation == "token"
    assert config.loss.normalizes_advantages
    assert config.loss.clip_range == pytest.approx((0.8, 1.5))
    sequence = parse_config(["--loss_calculator", "MINIRL", "--token_level_loss", "false"])
    assert sequence.loss.normalisation == "sequence"


def test_the_example_scripts_bring_no_flag_that_another_loss_would_not_have() -> None:
    flags = preset_flags(PRESETS["grpo"], 1, demo=True)
    assert parse_config(flags).loss.clip_range == pytest.approx((0.8, 1.2))
    config = parse_config([*flags, "--loss_calculator", "RLOO"])
    assert (config.reward.advantage, config.loss.normalisation) == ("leave_one_out", "none")


def test_skipping_the_length_normalisation_goes_before_all() -> None:
    config = parse_config(["--token_level_loss", "true", "--skip_length_normalization", "true"])
    assert config.loss.normalisation == "none"


def test_one_attempt_at_a_task_is_enough_where_attempts_are_not_compared() -> None:
    config = parse_config(["--loss_calculator", "REINFORCE++", "--num_generations", "1"])
    assert config.sampling.num_generations == 1
