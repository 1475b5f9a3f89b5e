"""Flags: what they give, and what a wrong one is told."""

import pytest

from agentrl.configs import TOOL_CALL_PARSERS, ConfigError, parse_config
from agentrl.redaction import without_passwords
from agentrl.rollout.tool_calls import PARSERS


def test_the_flags_of_an_existing_script_are_taken_as_they_are() -> None:
    config = parse_config(
        [
            "--model_name_or_path", "m", "--loss_calculater", "MINIRL",
            "--token_level_loss", "true",
            "--bf16", "--adv_scaling", "2.0", "--lr_scheduler_type", "cosine", "--tp_size", "1",
            "--preferred_sampling_params", '{"temperature": 0.7, "top_p": 1, "top_k": -1}',
            "--presence_penalty", "0.5", "--save_steps", "3", "--run_name", "a-run",
        ]
    )  # fmt: skip
    assert config.loss.loss_calculator == "MINIRL"
    assert config.loss.token_level_loss and config.compute.bf16
    assert config.temperature == 0.7
    assert config.sampling_params == {
        "temperature": 0.7, "top_p": 1, "top_k": -1, "presence_penalty": 0.5,
    }  # fmt: skip
    assert str(config.output) == "output/a-run"


def test_what_is_not_given_has_a_default() -> None:
    config = parse_config([])
    assert config.temperature == 1.0
    assert config.micro_batch_tokens == config.sampling.max_tokens
    assert config.sampling.max_staleness == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--foo", "1"], "unknown flag --foo"),
        (["--loss_calc", "GRPO"], "unknown flag --loss_calc"),
        (["--epsilon", "wide"], "--epsilon wide: must be a number"),
        (["--epsilon", "-1"], "--epsilon -1: must lie between 0 and 1"),
        (["--max_turns", "many"], "--max_turns many: must be a whole number"),
        (["--epsilon"], "--epsilon: expected one argument"),
        (["--loss_calculator", "TRPO"], "known: GRPO, Dr.GRPO"),
        (["--advantage", "gae"], "known: mean_std, mean, leave_one_out"),
        (["--kl_estimator", "k4"], "known: k1, k2, k3, abs"),
        (["--dual_clip", "0.5"], "--dual_clip 0.5: must be at least 1"),
        (["--epsilon", "1.5"], "--epsilon 1.5: must lie between 0 and 1"),
        (["--advantage_decay", "2"], "--advantage_decay 2: must lie between 0 and 1"),
        (["--importance_weight_cap_ratio", "0"], "must be above 0"),
        (["--out_of_date_decay", "0.1"], "has no effect without --importance_weight_cap_ratio"),
        (
            [
                "--out_of_date_decay",
                "0.1",
                "--importance_weight_cap_ratio",
                "4",
                "--strict_in_bound",
            ],
            "--out_of_date_decay: with --strict_in_bound true the band is the clip range",
        ),
        (
            ["--epsilon_higher", "0.1", "--clip_ratio_high", "0.3"],
            "--epsilon_higher and --clip_ratio_high: both say where the clip range ends above 1",
        ),
        (
            ["--warmup_steps", "5"],
            "--warmup_steps 5: has no effect with --lr_scheduler_type constant",
        ),
        (
            ["--balance_sample", "true", "--efficient_rewarding", "true"],
            "--efficient_rewarding true: has no effect with --balance_sample true",
        ),
        (["--balance_sample", "--min_turns", "2"], "--min_turns 2: has no effect with --balance"),
        (
            ["--efficient_rewarding", "--reserve_context_error_count", "2"],
            "--reserve_context_error_count 2: has no effect with --efficient_rewarding true",
        ),
        (["--report_to", "comet_ml"], "--report_to comet_ml: not known"),
        (
            ["--report_to", "none,tensorboard"],
            "--report_to none,tensorboard: none and all stand alone",
        ),
        (["--loss_calculator", "KL-Cov", "--kl_cov_ratio", "2"], "must lie between 0 and 1"),
        (["--loss_calculator", "Clip-Cov", "--clip_cov_ratio", "-1"], "between 0 and 1"),
        (["--loss_calculator", "PPO", "--value_clip", "0"], "--value_clip 0: must be above 0"),
        (["--weight_decay", "-0.1"], "--weight_decay -0.1: must be at least 0"),
        (["--adv_scaling", "0"], "--adv_scaling 0: must be above 0"),
        (["--num_train_epochs", "-1"], "--num_train_epochs -1: must be above 0"),
        (["--presence_penalty", "3"], "--presence_penalty 3: must lie between -2 and 2"),
        (["--normalization_length", "0"], "--normalization_length 0: must be at least 1"),
        (["--normalization_length", "9"], "give --skip_length_normalization true too"),
        (
            ["--token_level_loss", "true", "--skip_length_normalization", "true"],
            "has no effect with --token_level_loss true",
        ),
        (
            ["--loss_calculator", "MINIRL", "--rollout_is", "token"],
            "MINIRL has the weight between trainer and sampler already",
        ),
        (
            ["--loss_calculator", "GSPO", "--rollout_is_threshold", "2"],
            "the ratio of GSPO is to the proximal policy (--proximal_policy recompute)",
        ),
        (["--rollout_is", "token"], "give --proximal_policy recompute"),
        (["--rollout_is", "turn"], "known: token, sequence, geometric"),
        (["--kl_in_advantage", "true"], "has no effect without --beta"),
        *(
            (
                ["--kl_in_advantage", "true", "--beta", "0.1", "--kl_estimator", estimator],
                f"--kl_estimator {estimator}: as a penalty in the advantage it does not pull",
            )
            for estimator in ("k2", "k3", "abs")
        ),
        (
            ["--proximal_policy", "recompute", "--rollout_is_threshold", "2"],
            "no weight between trainer and sampler to cap; give it one with --rollout_is",
        ),
        (["--weight_update", "pigeon"], "known: disk, distributed, tensor"),
        (["--weight_update_pause", "abort"], "known: retract, in_place"),
        (["--tool_call_parser", "xml"], "known: qwen25, qwen"),
        (["--num_generations", "1"], "must be at least 2"),
        (["--run_name", "a/b"], "must be 1 to 38 letters"),
        (["--pp_size", "2"], "no pipeline parallelism"),
        (["--inf_mem_ratio", "1"], "must lie between 0 and 1"),
        (["--inf_share_gpus", "true"], "needs --sync_sampling"),
        (
            ["--inf_share_gpus=true", "--sync_sampling=true", "--weight_update=distributed"],
            "--weight_update distributed: not with --inf_share_gpus",
        ),
        (["--publish_steps", "4"], "weights are 3 steps old and --max_staleness allows 2, so"),
        (["--publish_steps", "2", "--sync_sampling", "true"], "--sync_sampling allows none"),
        (["--preferred_sampling_params", "{"], "not JSON"),
        (["--preferred_sampling_params", '{"temp": 1}'], "temp is not known; known: temperature"),
        (["--preferred_sampling_params", '{"temperature": 0}'], "must be above 0"),
        (["--preferred_sampling_params", '{"top_p": "x"}'], "top_p is not a number"),
        (["--preferred_sampling_params", '{"top_p": NaN}'], "top_p is not a finite number"),
        (["--preferred_sampling_params", '{"top_p": 1.5}'], "top_p 1.5 is not between 0 and 1"),
        (["--preferred_sampling_params", '{"top_k": 0}'], "top_k must not be 0"),
        (["--adam_beta1", "1"], "--adam_beta1 1: must be at least 0 and below 1"),
        (["--adam_beta2", "-0.1"], "--adam_beta2 -0.1: must be at least 0 and below 1"),
        (["--adam_epsilon", "0"], "--adam_epsilon 0: must be above 0"),
        (["--learning_rate", "inf"], "--learning_rate inf: must be a finite number"),
        (["--epsilon", "nan"], "--epsilon nan: must be a finite number"),
        (["--save_steps", "-1"], "--save_steps -1: must be at least 0"),
    ],
)
def test_a_wrong_flag_is_one_sentence_that_names_it(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(argv)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_flag_knows_all_tool_call_parsers_and_no_other() -> None:
    assert set(TOOL_CALL_PARSERS) == set(PARSERS)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("mongodb://u:se#cret@db:1/?authSource=admin", "mongodb://***@db:1/?authSource=admin"),
        ("mongodb://u:p/a#s?s@db,db2:1", "mongodb://***@db,db2:1"),
        ("mongodb://db/?tlsCertificateKeyFilePassword=x&w=1",
         "mongodb://db/?tlsCertificateKeyFilePassword=***&w=1"),
        ("http://h/mcp?token=abc&n=1", "http://h/mcp?token=***&n=1"),
        ("a=http://u:p@h/mcp, http://h2/mcp@x", "a=http://***@h/mcp, http://***@x"),
        ("MongoDB at db:27017 is away", "MongoDB at db:27017 is away"),
    ],
)  # fmt: skip
def test_what_is_secret_in_a_url_is_shown_to_nobody(url: str, shown: str) -> None:
    assert without_passwords(url) == shown


def test_samplers_run_ahead_by_what_publications_leave_of_the_staleness_bound() -> None:
    def steps_ahead(*flags: str) -> int:
        return parse_config([*flags], "agentrl train", {}).steps_ahead

    assert steps_ahead("--max_staleness", "3") == 3
    assert steps_ahead("--max_staleness", "3", "--publish_steps", "2") == 2
    assert steps_ahead("--max_staleness", "3", "--publish_steps", "4") == 0
    assert steps_ahead("--sync_sampling", "true") == 0
