"""Flags of the original AgentRL and of transformers: each taken, idle or refused, none unknown."""

import re
import shlex
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from agentrl.configs import Config, ConfigError, parse_config
from agentrl.configs.command_line import read_familiar, run_parser
from agentrl.configs.familiar import FAMILIAR, Treatment
from agentrl.configs.familiar.original_defaults import (
    ORIGINAL_DEFAULTS,
    TRANSFORMERS_DEFAULTS,
    original_layer,
)
from agentrl.configs.flags import FLAGS, written
from agentrl.configs.parsing import config_of, given_values
from agentrl.configs.verbs import sft_parser
from agentrl.launcher.deployment import read_deployment
from agentrl.launcher.inventory import Inventory
from agentrl.launcher.presets import GRPO
from agentrl.launcher.stack import plan_stack

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from-agentrl.md"
NAMES = {name for flag in FLAGS.values() for name in (flag.name, *flag.info.aliases)}

# What its three scripts and its configuration class have beside transformers.TrainingArguments.
ORIGINAL = [
    "trainer",
    "train_file",
    "max_pixels",
    "remove_experience",
    "drop_zero_advantage",
    "shift_labels",
    "db_connection_string",
    "oss_connection_string",
    "enable_oss",
    "skip_non_positive_advantage",
    "model_name_or_path",
    "attention_implementation",
    "output_router_logits",
    "trust_remote_code",
    "cpu_ram_efficient_loading",
    "torch_dtype",
    "tp_size",
    "pp_size",
    "ep_size",
    "cp_size",
    "pad_to_multiple_of",
    "bypass_causal_mask_check",
    "enable_loss_parallel",
    "loss_seq_chunk_size",
    "activation_offloading",
    "decoder_sparse_step",
    "remove_unused_columns",
    "pad_to_maximum",
    "dynamic_batching",
    "learning_rate",
    "epsilon",
    "epsilon_higher",
    "beta1",
    "beta2",
    "tune_vision",
    "adv_scaling",
    "max_tokens",
    "balance_sample",
    "token_level_loss",
    "out_of_date_decay",
    "importance_weight_cap_ratio",
    "strict_in_bound",
    "log_entropy",
    "skip_length_normalization",
    "loss_calculater",
    "max_trained_count",
    "retrained_interval",
    "minimal_advantage",
    "enable_sampling",
    "sync_sampling",
    "max_new_tokens",
    "max_prompt_tokens",
    "num_generations",
    "tool_call_parser",
    "model_name",
    "inf_tp_size",
    "inf_ep_size",
    "max_concurrent_samples_per_process",
    "target_concurrency",
    "inf_mem_ratio",
    "top_k",
    "presence_penalty",
    "frequency_penalty",
    "preferred_sampling_params",
    "resample_error_records",
    "mcp_server_name",
    "mcp_manager_url",
    "mcp_auth_token",
    "max_turns",
    "min_turns",
    "repetition_early_stop_times",
    "enable_repetition_compress",
    "new_context",
    "agent_config_path",
    "reserve_context_error_count",
    "efficient_rewarding",
    "compress_history",
    "seed",
    "run_name",
    "report_to",
    "output_dir",
    "weight_decay",
    "optim_args",
    "max_steps",
    "num_train_epochs",
    "dataloader_drop_last",
    "dataloader_num_workers",
    "max_grad_norm",
    "logging_steps",
    "warmup_steps",
    "lr_scheduler_type",
    "bf16",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "eval_strategy",
    "eval_steps",
    "save_only_model",
    "save_steps",
    "dataloader_prefetch_factor",
    "accelerator_config",
]

COMMON = (
    "--model_name_or_path M --trainer QwenTrainer --db_connection_string "
    "mongodb://host:27016/RUN?replicaSet=rs0 --seed 42 --run_name RUN --report_to all "
    "--enable_sampling true --mcp_manager_url http://host:9700/mcpapi --max_new_tokens 32768 "
    "--max_prompt_tokens 128768 --num_generations 8 --tool_call_parser qwen "
    """--preferred_sampling_params '{"temperature": 1, "top_p": 1, "min_p": 0, "top_k": -1}' """
    "--frequency_penalty 0.0 --inf_tp_size 1 --inf_mem_ratio 0.8 "
    "--max_concurrent_samples_per_process 4 --target_concurrency 3 --max_turns 200 "
    "--repetition_early_stop_times 4 --enable_repetition_compress false --output_dir output/RUN "
)
TRAINING = COMMON + (
    "--presence_penalty 0.0 --cpu_ram_efficient_loading true --weight_decay 0.05 "
    "--optim_args 'beta1=0.9,beta2=0.98' --max_steps 1000 --num_train_epochs 5 --adv_scaling 2.0 "
    "--max_tokens 131072 --max_trained_count 1 --train_file F --dataloader_drop_last true "
    "--dataloader_num_workers 1 --max_grad_norm 1.0 --logging_steps 1 --learning_rate 2e-6 "
    "--warmup_steps 5 --lr_scheduler_type cosine --bf16 --tp_size 4 --pp_size 1 "
    "--activation_offloading false --per_device_train_batch_size 1 "
    "--gradient_accumulation_steps 48 --eval_strategy no --eval_steps 5 --save_steps 3 "
    "--dataloader_prefetch_factor 4 --pad_to_multiple_of 4096 "
    """--accelerator_config '{"split_batches":true}' """
)
SCRIPTS = {
    "grpo": TRAINING + "--loss_calculater GRPO --token_level_loss true --balance_sample true "
    "--save_only_model true",
    "minirl": TRAINING + "--loss_calculater MINIRL --token_level_loss false --strict_in_bound true "
    "--skip_length_normalization true --balance_sample false --save_only_model false "
    "--compress_history false",
    "eval": COMMON + "--presence_penalty 1.0",
}


def as_there(command: str) -> Config:
    """The configuration of a script of the original AgentRL, with its defaults."""
    values = given_values(shlex.split(command), "src/main.py")
    return config_of({**original_layer(values), **values})


def text_of(value: object) -> str:
    """A value of a dataclass as the text of a flag."""
    value = getattr(value, "value", value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_every_flag_of_transformers_is_a_flag_here_or_has_a_treatment() -> None:
    known = {*NAMES, *FAMILIAR}
    assert [field.name for field in fields(TrainingArguments) if field.name not in known] == []


def test_the_defaults_of_transformers_are_those_of_the_installed_version() -> None:
    theirs = {field.name: field.default for field in fields(TrainingArguments)}
    for name, value in TRANSFORMERS_DEFAULTS.items():
        there = getattr(theirs[name], "value", theirs[name])
        assert there == value, name
    ours = NAMES & set(theirs)
    assert ours - set(TRANSFORMERS_DEFAULTS) == {"learning_rate"}  # AgentRL's own is 1e-6


def test_every_flag_of_the_original_is_a_flag_here_or_has_a_treatment() -> None:
    assert [name for name in ORIGINAL if name not in {*NAMES, *FAMILIAR}] == []
    assert set(ORIGINAL_DEFAULTS) <= set(ORIGINAL)


def test_no_flag_is_known_twice() -> None:
    assert NAMES.isdisjoint(FAMILIAR)


def test_the_page_has_every_flag_of_both() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## What the words mean")[0]
    named = set(re.findall(r"`--(\w+)`", table))
    assert {*ORIGINAL, *(field.name for field in fields(TrainingArguments))} <= named


@pytest.mark.parametrize("field", fields(TrainingArguments), ids=lambda field: field.name)
def test_what_transformers_does_by_default_is_never_refused(field: object) -> None:
    name, default = field.name, field.default  # type: ignore[attr-defined]
    if default is None or default is MISSING:
        return
    parse_config([f"--{name}={text_of(default)}"])


@pytest.mark.parametrize("name", [name for name in ORIGINAL if ORIGINAL_DEFAULTS.get(name)])
def test_what_the_original_does_by_default_is_never_refused(name: str) -> None:
    value = ORIGINAL_DEFAULTS[name]
    assert value is not None
    as_there(f"--{name} {shlex.quote(written(value))}")


def test_a_familiar_flag_says_in_one_sentence_why_or_what_else() -> None:
    for name, flag in FAMILIAR.items():
        assert flag.said and "\n" not in flag.said and not flag.said.endswith("."), name
        assert (flag.translation is not None) == (flag.treatment is Treatment.TRANSLATED), name
        for other in re.findall(r"--(\w+)", flag.said):
            assert other in NAMES, f"{name}: there is no --{other}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_scripts_of_the_original_are_taken_as_they_stand(script: str) -> None:
    config = as_there(SCRIPTS[script])
    assert config.sampling.max_concurrent_samples_per_process == 4
    assert config.temperature == 1.0
    if script == "eval":
        assert config.sampling.presence_penalty == 1.0
        return
    optimizer = config.optimizer
    assert (optimizer.adam_beta1, optimizer.adam_beta2) == (0.9, 0.98)
    assert (optimizer.warmup_steps, optimizer.lr_scheduler_type) == (5, "cosine")
    assert config.data.eval_steps == 0 and config.checkpoint.save_steps == 3
    assert config.compute.bf16 and config.compute.pad_to_multiple_of == 4096
    assert config.loss.clip_range == pytest.approx((0.8, 1.3))
    assert config.loss.band == (1.0 if script == "minirl" else 4.0)
    assert config.loss.centre == "behaviour" and config.loss.weight_cap is None
    assert config.loss.normalisation == ("constant" if script == "minirl" else "token")
    assert config.learner.loss.divisor == (1 if script == "minirl" else 32768)
    reward = config.reward
    assert (reward.advantage, reward.min_score_spread) == ("leave_one_out_clipped", 0.1)
    assert (reward.balance_sample, reward.min_turns) == (script == "grpo", 1)
    assert reward.reserve_context_error_count == 0 and reward.adv_scaling == 2.0


def test_a_flag_that_is_left_out_has_the_value_that_it_has_there() -> None:
    config = as_there("--model_name_or_path M")
    assert (config.sampling.max_turns, config.sampling.max_new_tokens) == (25, 8196)
    assert config.sampling.max_concurrent_samples_per_process == 1
    assert (config.optimizer.per_device_train_batch_size, config.optimizer.adam_beta2) == (8, 0.999)
    assert config.optimizer.lr_scheduler_type == "linear"
    assert (config.run.logging_steps, config.checkpoint.save_steps) == (500, 500)
    assert config.checkpoint.save_total_limit == 0  # all are kept
    assert config.reward.balance_sample and config.loss.band == 4.0
    assert config.agent.mcp_manager_url == "http://localhost:9876/mcpapi"
    # and here the one that we recommend
    assert parse_config([]).sampling.max_turns == 200


@pytest.mark.parametrize("loss", ["DAPO", "PPO", "RLOO", "CrossEntropy"])
def test_a_loss_that_the_original_does_not_have_keeps_the_values_of_its_paper(loss: str) -> None:
    there, here = as_there(f"--loss_calculater {loss}"), parse_config(["--loss_calculator", loss])
    assert there.loss == here.loss and there.reward.advantage == here.reward.advantage


@pytest.mark.parametrize(
    ("given", "flag", "value"),
    [
        ("--warmup_ratio 0.1", "warmup_steps", 0.1),
        ("--warmup_ratio 0.1 --warmup_steps 7", "warmup_steps", 7),
        ("--optim_args beta1=0.8,eps=1e-6", "adam_epsilon", 1e-6),
        ("--eval_strategy no --eval_steps 5", "eval_steps", 0),
        ("--eval_strategy steps --eval_steps 5", "eval_steps", 5),
        ("--evaluation_strategy steps --logging_steps 20", "eval_steps", 20),
        ("--save_strategy no", "save_steps", 0),
        ("--save_strategy steps --save_steps 7", "save_steps", 7),
        ("--torch_compile", "compile", True),
        ("--activation_checkpointing true", "gradient_checkpointing", True),
        ("--no_cuda", "use_cpu", True),
        ("--skip_non_positive_advantage True", "minimal_advantage", 1e-6),
        ("--skip_non_positive_advantage false", "minimal_advantage", None),
        ("--ddp_timeout 7200", "ddp_timeout", 7200),
        ("--report_to tensorboard,swanlab", "report_to", "tensorboard,swanlab"),
        ('--lr_scheduler_kwargs {"min_lr_rate":0.1}', "lr_scheduler_kwargs", '{"min_lr_rate":0.1}'),
    ],
)
def test_a_flag_of_another_name_becomes_one_of_this_trainer(
    given: str, flag: str, value: object
) -> None:
    config = parse_config([*given.split(), "--lr_scheduler_type", "cosine"])
    assert getattr(getattr(config, FLAGS[flag].group), flag) == value


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("--optim adafactor", "--optim adafactor: AdamW is the only optimizer here"),
        ("--optim_args lr=1", "--optim_args lr=1: must be beta1=…,beta2=…,eps=…"),
        ("--optim_args beta1=x", "--adam_beta1 x: must be a number"),
        ("--fp16", "--fp16 true: float16 needs a scaled loss and is not here; give --bf16"),
        ("--torch_dtype float16", "--bf16 computes in bfloat16"),
        ("--warmup_ratio 2", "--warmup_ratio 2: must be at least 0 and below 1"),
        ("--eval_strategy epoch", "--eval_strategy epoch: must be no or steps"),
        ("--save_strategy best", "choose the best checkpoint with `agentrl eval`"),
        ("--trainer QwenVLTrainer", "--trainer QwenVLTrainer: this trainer trains the text part"),
        ("--shift_labels false", "--shift_labels false: a token is always predicted"),
        ("--deepspeed ds.json", "--deepspeed ds.json: parameters are sharded by FSDP2"),
        ("--oss_connection_string minio://key:hush@host/b", "minio://***@host/b: images and files"),
        ("--push_to_hub", "`agentrl export CHECKPOINT FOLDER`"),
        ("--logging_first_step --logging_steps 5", "give --logging_steps 1"),
        ("--lr_scheduler_type greedy", "--lr_scheduler_type greedy: not known"),
        ("--save_steps 0.1", "--save_steps 0.1: must be a whole number"),
        ("--pp_size 2", "--pp_size 2: there is no pipeline parallelism"),
    ],
)
def test_what_cannot_be_had_is_refused_by_one_sentence_that_says_what_else(
    given: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(given.split())
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_what_has_nothing_to_do_is_said_in_one_block_once_with_one_line_for_each_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.configs.command_line._printed", set())
    flags = [
        "--dataloader_num_workers",
        "4",
        "--dynamic_batching",
        "false",
        "--no_dataloader_pin_memory",
        "--label_names",
        "labels",
        "weights",
        "--max_turns",
        "3",
    ]
    for _ in range(2):
        assert parse_config(flags).sampling.max_turns == 3
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "Taken, without effect here:" and len(said) == 4
    assert any(
        line.startswith("  --dataloader_num_workers, --dataloader_pin_memory: ") for line in said
    )
    assert any(line.startswith("  --dynamic_batching: rows share micro-batches") for line in said)
    monkeypatch.setattr("agentrl.configs.command_line._printed", set())
    monkeypatch.setenv("RANK", "1")
    parse_config(flags)
    assert capsys.readouterr().err == ""


def test_a_flag_of_this_trainer_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    parse_config(["--max_turns", "3", "--epsilon", "0.1", "--optim", "adamw_torch"])
    assert capsys.readouterr().err == ""


def test_a_file_of_flags_takes_them_too(tmp_path: Path) -> None:
    file = tmp_path / "run.yml"
    file.write_text(
        "optim_args: beta2=0.98\neval_strategy: no\naccelerator_config: {split_batches: true}\n"
        "label_names: [a, b]\nfp16: false\nmax_turns: 4\nhub_token:\n"
    )
    config = parse_config(["--config", str(file)])
    assert (config.optimizer.adam_beta2, config.sampling.max_turns) == (0.98, 4)
    file.write_text("fp16: true\n")
    with pytest.raises(ConfigError) as error:
        parse_config(["--config", str(file)])
    assert str(error.value).startswith(f"{file}: fp16 true: float16 needs")


def test_the_parts_of_a_launch_get_flags_of_this_trainer_only() -> None:
    user = "--warmup_ratio 0.1 --lr_scheduler_type cosine --dataloader_num_workers 4 --do_train"
    stack = plan_stack(GRPO, "demo", user.split(), read_deployment({}), Inventory(()))
    assert {word[2:] for word in stack.flags if word.startswith("--")} <= set(FLAGS)
    assert stack.config.optimizer.warmup_steps == 0.1


def test_supervised_training_takes_what_it_has_a_flag_for() -> None:
    given = ["--model", "M", "--train_file", "F", "--warmup_ratio", "0.1", "--do_train"]
    assert sft_parser().parse(given).values == {"warmup_steps": 0.1}
    with pytest.raises(ConfigError, match="--minimal_advantage 1e-06: `agentrl sft` has no such"):
        sft_parser().parse([*given, "--skip_non_positive_advantage"])


def test_a_value_of_yes_and_no_is_read_as_transformers_writes_it() -> None:
    for word in ("True", "true", "1", "yes"):
        assert read_familiar({"torch_compile": word}, {}) == {"compile": True}
    given = run_parser("agentrl train").parse(["--bf16", "--balance_sample", "False"])
    assert given.values == {"bf16": True, "balance_sample": False}
