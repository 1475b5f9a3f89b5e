"""What Accelerate, its file and the original's scripts say by environment variables."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from agentrl.configs import ConfigError
from agentrl.configs.parsing import config_of, merged
from agentrl.launcher.accelerated import MAIN, _be_a_trainer, given_layers, shared_gpus
from agentrl.launcher.deployment import read_deployment
from agentrl.launcher.inventory import described
from agentrl.launcher.script_environment import (
    Place,
    environment_layers,
    forget_fsdp,
    not_followed,
)
from agentrl.launcher.stack import plan_layers
from agentrl.training import trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))

from original_scripts import SCRIPTS

# Of the third of four processes on two machines, as torch's agent sets them.
THIRD = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
         "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511"}  # fmt: skip


def test_a_process_knows_its_machine_by_what_accelerate_says() -> None:
    place = Place.read(THIRD)
    assert (place.machine, place.machines, place.processes_here) == (1, 2, 2)
    # What a script exports for `accelerate launch` says the same, or nothing.
    variables = place.variables(
        {**THIRD, "MACHINE_RANK": "0", "NUM_MACHINES": " ", "DB_URL": ""}, 0
    )
    deployment = read_deployment(variables)
    assert (deployment.machine_rank, deployment.num_machines) == (1, 2)
    assert (deployment.num_processes, deployment.meeting_port) == (4, 29511)
    assert deployment.master_addr == "10.0.0.1"
    # As there: a sampler process for each trainer process, a service on each machine.
    assert (deployment.samplers(9), deployment.num_services) == (2, 1)
    # On GPUs by the plan of a launch; none where others are given.
    assert read_deployment(place.variables(THIRD, 8)).num_services is None
    given = {**THIRD, "INFERENCE_URLS": "http://a:1"}
    assert read_deployment(place.variables(given, 0)).num_services is None


def test_a_user_says_otherwise_how_many_samplers_and_services_there_are() -> None:
    given = {**THIRD, "NUM_SAMPLERS": "5", "NUM_SERVICES": "3"}
    deployment = read_deployment(Place.read(given).variables(given, 8))
    assert (deployment.samplers(9), deployment.num_services) == (5, 3)


def test_without_accelerate_a_process_is_the_only_one() -> None:
    environment: dict[str, str] = {}
    place = Place.read(environment)
    assert (place.rank, place.processes, place.machines) == (0, 1, 1)
    place.settle(environment)
    assert (environment["WORLD_SIZE"], environment["RANK"]) == ("1", "0")
    assert read_deployment(place.variables(environment, 0)).meeting_port is None
    before = dict(THIRD)
    Place.read(before).settle(before)
    assert before == THIRD


def test_the_time_of_a_collective_is_given_in_milliseconds() -> None:
    flags = ["--model_name_or_path", "m", "--run_name", "a"]
    layers = given_layers(flags, {"NCCL_TIMEOUT": "14400000"}, "src/main.py")
    assert config_of(merged(layers)).parallel.ddp_timeout == 14400
    layers = given_layers([*flags, "--ddp_timeout", "60"], {"NCCL_TIMEOUT": "9"}, "src/main.py")
    assert config_of(merged(layers)).parallel.ddp_timeout == 60
    with pytest.raises(ConfigError, match="NCCL_TIMEOUT=4h: must be a whole number of milli"):
        environment_layers({"NCCL_TIMEOUT": "4h"})


def test_fsdp_config_is_followed_or_named() -> None:
    # As Accelerate hands on `fsdp_config`.
    asked = {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_OFFLOAD_PARAMS": "true", "FSDP_ACTIVATION_CHECKPOINTING": "true",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    }  # fmt: skip
    flags = merged(environment_layers(asked))
    assert flags == {"param_offload": True, "gradient_checkpointing": True}
    [line] = not_followed(asked)
    assert "reshard_after_forward: false, state_dict_type: FULL_STATE_DICT is not" in line
    forget_fsdp(asked)
    assert asked == {}
    assert not_followed({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}) == []


def test_the_run_is_named_by_its_flag_or_by_its_database() -> None:
    model = ["--model_name_or_path", "m"]
    url = "mongodb://u:p@host:27016/mine?replicaSet=rs0"

    def name(*flags: str) -> object:
        return merged(given_layers([*model, *flags], {}, "src/main.py"))["run_name"]

    assert name() == "run"
    assert name("--db_connection_string", url) == "mine"
    assert name("--db_connection_string", url, "--run_name", "mine") == "mine"
    assert name("--db_connection_string", "mongodb://host:1/?replicaSet=rs0") == "run"
    with pytest.raises(ConfigError, match="names 'mine': give both the same name"):
        name("--db_connection_string", url, "--run_name", "other")
    with pytest.raises(ConfigError, match=r"src/main.py: --model_name_or_path is needed"):
        given_layers([], {}, "src/main.py")


def test_flags_that_are_left_out_mean_what_they_mean_there() -> None:
    config = config_of(merged(given_layers(["--model_name_or_path", "m"], {}, "src/main.py")))
    assert config.agent.answer_schema == "answer"
    assert (config.sampling.max_turns, config.reward.min_turns) == (25, 1)


QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560,
    "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 262144, "tie_word_embeddings": True,
}  # fmt: skip


def test_the_scripts_fit_eight_gpus_that_all_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    text = SCRIPTS["grpo"].flags.format(**SCRIPTS["grpo"].values).replace("$ROWS", "48")
    words = shlex.split(text.replace("--tp_size 1", "--tp_size 4").replace("$MAX_STEPS", "1000"))
    words[words.index("--model_name_or_path") + 1] = str(tmp_path)
    url = words.index("--db_connection_string") + 1
    words[url : url + 1] = ["mongodb://host:27016/mine?replicaSet=rs0"]
    words[words.index("--run_name") + 1] = "mine"
    layers, [told] = shared_gpus(given_layers(words, {}, "src/main.py"), gpus=8, processes=8)
    assert told.startswith("every GPU trains")
    eight = Place(rank=0, local_rank=0, processes=8, processes_here=8)
    deployment = read_deployment(eight.variables({}, 8))
    inventory = described("8x80")
    stack = plan_layers(MAIN, "mine", layers, deployment, inventory, cores=64)
    placement = stack.placement
    assert placement is not None and placement.serve is not None
    assert placement.train.gpus == 8 and stack.trainers == 8
    assert stack.config.parallel.tp_size == 4 and stack.config.services.inf_share_gpus
    assert (stack.services, stack.samplers) == (8, 3)  # --target_concurrency 3, of each service

    # A process beside the first one has the GPUs in the order of the first one's.
    monkeypatch.setattr(os, "environ", {"LOCAL_RANK": "1"})
    monkeypatch.setattr(trainer, "run_process", lambda flags: None)
    _be_a_trainer(stack)
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"


def test_gpus_that_do_not_train_serve(tmp_path: Path) -> None:
    layers = given_layers(["--model_name_or_path", "m", "--inf_mem_ratio", "0.8"], {}, "main")
    assert shared_gpus(layers, gpus=8, processes=4) == (layers, [])
    without, [told] = shared_gpus(layers, gpus=0, processes=1)
    assert "inf_mem_ratio" not in merged(without) and "has no GPU" in told


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        ("--strict_in_bound true --out_of_date_decay 0.3", ["out_of_date_decay"]),
        (
            "--efficient_rewarding true --min_turns 3 --reserve_context_error_count 2",
            ["efficient_rewarding", "min_turns", "reserve_context_error_count"],
        ),
        (
            "--balance_sample false --efficient_rewarding true --reserve_context_error_count 2",
            ["reserve_context_error_count"],
        ),
        ("--skip_length_normalization true", ["skip_length_normalization"]),
        ("--loss_calculater MINIRL --beta1 0.5 --beta2 1", ["beta1", "beta2"]),
        ("--strict_in_bound false --out_of_date_decay 0.3 --balance_sample true", []),
    ],
)
def test_flags_that_run_together_there_run_here_with_a_line(
    flags: str,
    idle: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentrl.configs.command_line._printed", set())
    words = ["--model_name_or_path", "m", *flags.split()]
    values = merged(given_layers(words, {}, "src/main.py"))
    config_of(values)
    said = capsys.readouterr().err.splitlines()[1:]
    assert [line.split(":")[0].strip(" -") for line in said] == idle
    assert all(values.get(name) in (None, 0, 1) for name in idle)
