"""Environment variables, and what a stack starts because of them."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.configs import ConfigError, parse_config
from agentrl.configs.parsing import given_values
from agentrl.configs.run_flags import joined_config, stored_flags
from agentrl.launcher.deployment import count_gpus, describe_variables, read_deployment
from agentrl.launcher.inventory import Inventory, described
from agentrl.launcher.presets import (
    DEMO,
    DEMO_TOOLS,
    GRPO,
    PRESETS,
    ROWS_PER_STEP,
    Preset,
    preset_flags,
    rows_of_each,
)
from agentrl.launcher.processes import Kind, Part
from agentrl.launcher.run_folder import PARTS_END_S
from agentrl.launcher.stack import (
    Addresses,
    Stack,
    plan_parts,
    plan_samplers,
    plan_stack,
    sampler_flags,
    thread_environment,
    with_urls,
)

ADDRESSES = Addresses(service_ports=(7002, 7003), trainer_port=7004)
ELSEWHERE = {
    "DB_URL": "mongodb://db:27017",
    "MCP_URL": "http://tools/mcp",
    "INFERENCE_URLS": "http://a:1,http://b:1",
}


def stack_of(environment: dict[str, str], *flags: str, gpus: int = 0) -> Stack:
    inventory = described(f"{gpus}x80") if gpus else Inventory()
    return plan_stack(GRPO, "demo", flags, read_deployment(environment), inventory)


def parts_of(stack: Stack) -> dict[str, Part]:
    stack = with_urls(stack, "mongodb://127.0.0.1:7000")
    return {part.name: part for part in plan_parts(stack, ADDRESSES, {})}


def flag(part: Part, name: str) -> str:
    """The last value of a flag, which is the one that counts."""
    last = max(i for i, word in enumerate(part.command) if word == name)
    return part.command[last + 1]


def test_a_launch_after_a_killed_one_waits_longer_than_its_parts_may_take_to_end() -> None:
    parts = parts_of(plan_stack(GRPO, "demo", [], read_deployment({}), Inventory()))
    assert max(part.grace_s for part in parts.values()) < PARTS_END_S


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_every_flag_of_a_preset_is_a_flag_of_the_run(preset: Preset) -> None:
    config = parse_config([*preset_flags(preset, 1, demo=True), "--run_name", "demo"])
    assert config.loss.loss_calculator.lower() == preset.name
    assert config.optimizer.per_device_train_batch_size == ROWS_PER_STEP


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_step_of_the_demo_has_the_same_rows_however_many_processes_train(processes: int) -> None:
    config = parse_config(preset_flags(GRPO, processes, demo=True))
    assert config.optimizer.per_device_train_batch_size * processes == ROWS_PER_STEP


@given(st.integers(1, 512), st.integers(1, 64))
def test_a_step_has_whole_groups_of_about_as_many_rows_for_any_number_of_ranks(
    ranks: int, group: int
) -> None:
    rows = rows_of_each(ranks, group) * ranks
    whole = math.lcm(ranks, group)  # the least with whole groups
    assert rows % group == 0 if whole <= 2 * ROWS_PER_STEP else rows <= max(ranks, ROWS_PER_STEP)
    # None with whole groups is nearer.
    if rows % whole == 0 and rows > whole:
        assert abs(rows - ROWS_PER_STEP) <= abs(rows - whole - ROWS_PER_STEP)
    assert rows <= max(ranks, 2 * ROWS_PER_STEP)


@pytest.mark.parametrize(("gpus", "rows"), [(3, 120), (6, 120), (7, 112), (4, 128)])
def test_the_rows_of_a_launch_are_those_of_whole_groups(gpus: int, rows: int) -> None:
    def each(*flags: str) -> int:
        stack = stack_of({"NUM_PROCESSES": str(gpus)}, *flags)
        return stack.config.optimizer.per_device_train_batch_size

    assert each() * gpus == rows
    assert each("--num_generations", "12") * gpus % 12 == 0


def test_processes_that_train_the_same_rows_count_as_one_for_the_rows_of_a_step() -> None:
    stack = stack_of({"NUM_PROCESSES": "4"}, "--tp_size", "2")
    assert stack.config.optimizer.per_device_train_batch_size * 2 == ROWS_PER_STEP


def test_a_model_of_ones_own_gets_the_algorithm_but_nothing_of_the_demo() -> None:
    stack = stack_of({"MODEL": "mine", "TRAIN_FILE": "t.jsonl"})
    usual = parse_config([])
    assert (stack.config.sampling, stack.config.data.eval_file) == (usual.sampling, None)
    assert stack.config.optimizer.learning_rate == usual.optimizer.learning_rate
    assert stack.config.loss.loss_calculator == "GRPO"
    assert not stack.tools and "no tools" in stack.line
    assert "tools given" in stack_of({"MODEL": "mine", "MCP_URL": "http://tools"}).line


def test_without_variables_everything_is_started_here() -> None:
    stack = stack_of({})
    assert (stack.mongod, stack.tools, stack.services) == (True, True, 1)
    parts = parts_of(stack)
    assert list(parts) == ["service", "trainer", "sampler-0"]
    for name in ("trainer", "sampler-0"):
        assert parts[name].environment["DB_URL"] == "mongodb://127.0.0.1:7000"
        assert parts[name].environment["MCP_URL"] == DEMO_TOOLS
    assert parts["service"].environment["DB_URL"] == "mongodb://127.0.0.1:7000"
    assert flag(parts["service"], "--port") == "7002"
    assert flag(parts["trainer"], "--config_file").endswith("assets/fsdp2_cpu.yml")
    assert parts["trainer"].log == Path("logs/as/demo_train_0.log")


def test_empty_variables_count_as_not_set() -> None:
    assert read_deployment({"DB_URL": "", "NUM_SAMPLERS": " "}) == read_deployment({})


def test_with_all_urls_given_nothing_embedded_is_started() -> None:
    stack = stack_of(ELSEWHERE)
    assert not stack.mongod
    parts = plan_parts(stack, ADDRESSES, {})
    assert [part.kind for part in parts] == [Kind.TRAINER, Kind.SAMPLER]
    assert flag(parts[1], "--inference_urls") == "http://a:1,http://b:1"
    assert parts[1].environment["MCP_URL"] == "http://tools/mcp"


def test_no_part_is_told_a_password_by_its_command_line() -> None:
    environment = {**ELSEWHERE, "DB_URL": "mongodb://me:pass%2Fword@db", "MCP_AUTH_TOKEN": "t0ken"}
    stack = stack_of({**environment, "INFERENCE_URLS": ""}, "--inference_api_key_env", "KEY")
    parts = plan_parts(stack, ADDRESSES, {})
    assert [part.kind for part in parts] == [Kind.SERVICE, Kind.TRAINER, Kind.SAMPLER]
    for part in parts:
        assert not [word for word in part.command if "pass" in word or "t0ken" in word]
        assert part.environment["DB_URL"] == environment["DB_URL"]
        assert flag(part, "--inference_api_key_env") == "KEY"
    for part in parts[1:]:
        verb = "sample" if part.kind is Kind.SAMPLER else "agentrl.training.trainer"
        flags = part.command[part.command.index(verb) + 1 :]
        read = parse_config(flags, environment=part.environment)
        assert read.run.db_connection_string == environment["DB_URL"]
        assert read.agent.mcp_auth_token == "t0ken"


def test_flags_after_the_name_take_precedence_over_variables() -> None:
    stack = stack_of({"MODEL": "from-variable"}, "--model_name_or_path", "from-flag")
    assert stack.config.model.model_name_or_path == "from-flag"
    assert stack_of({"MODEL": "m"}).config.model.model_name_or_path == "m"


def test_counts_of_processes_samplers_and_services_are_followed() -> None:
    stack = stack_of({"NUM_PROCESSES": "2", "NUM_SAMPLERS": "3", "NUM_SERVICES": "2"})
    parts = parts_of(stack)
    assert [name for name in parts if name.startswith("s")] == [
        "service-0", "service-1", "sampler-0", "sampler-1", "sampler-2",
    ]  # fmt: skip
    assert flag(parts["trainer"], "--num_processes") == "2"
    assert flag(parts["service-1"], "--port") == "7003"


def test_gpus_are_divided_between_trainer_and_services_unless_the_cpu_is_asked_for() -> None:
    parts = parts_of(stack_of({}, gpus=4))
    assert flag(parts["trainer"], "--num_processes") == "2"
    assert flag(parts["trainer"], "--config_file").endswith("assets/fsdp2_dst.yml")
    assert flag(parts["trainer"], "--micro_batch_tokens") == "4096", "the demo's own"
    devices = {name: part.environment.get("CUDA_VISIBLE_DEVICES") for name, part in parts.items()}
    assert devices["trainer"] == "0,1"
    assert (devices["service-0"], devices["service-1"]) == ("2", "3")
    assert devices["sampler-0"] is None
    on_cpu = parts_of(stack_of({}, "--use_cpu", "true", gpus=4))
    assert flag(on_cpu["trainer"], "--num_processes") == "1"


def samplers_of(environment: dict[str, str], stored: list[str]) -> Stack:
    """Samplers that are added to a run whose database holds the flags `stored`."""
    deployment = read_deployment({"SAMPLERS_ONLY": "1", **environment})
    flags = sampler_flags("demo", [], deployment)
    run = stored_flags(parse_config(["--model_name_or_path", str(DEMO / "model"), *stored]))
    joined = joined_config("demo", run, {}, given_values(flags, "agentrl launch"))
    return plan_samplers(flags, joined, deployment)


def test_samplers_only_starts_samplers_which_need_no_more_than_the_run_s_database() -> None:
    tools = ["--mcp_manager_url", ELSEWHERE["MCP_URL"], "--max_turns", "7"]
    stack = samplers_of({"DB_URL": ELSEWHERE["DB_URL"], "NUM_SAMPLERS": "2"}, tools)
    assert stack.config.sampling.max_turns == 7
    parts = plan_parts(with_urls(stack, ELSEWHERE["DB_URL"]), ADDRESSES, {})
    assert [part.kind for part in parts] == [Kind.SAMPLER, Kind.SAMPLER]
    for part in parts:
        assert part.command[-2:] == ("--run_name", "demo")
        assert part.environment["DB_URL"] == ELSEWHERE["DB_URL"]
    with pytest.raises(ConfigError, match="DB_URL"):
        samplers_of({}, tools)
    secret = ["--mcp_manager_url", "http://user:password@tools/mcp"]
    for stored in ([], secret):
        with pytest.raises(ConfigError, match="MCP_URL"):
            samplers_of({"DB_URL": ELSEWHERE["DB_URL"]}, stored)
    assert samplers_of(ELSEWHERE, secret).config.agent.mcp_manager_url == ELSEWHERE["MCP_URL"]
    alone = samplers_of({"DB_URL": ELSEWHERE["DB_URL"]}, ["--agent_name", "single_turn"])
    assert alone.samplers == 1
    with pytest.raises(ConfigError, match="start nothing"):
        samplers_of({**ELSEWHERE, "NUM_SAMPLERS": "0"}, tools)


def test_further_machines_only_train_and_meet_at_the_first() -> None:
    environment = {
        **ELSEWHERE, "NUM_MACHINES": "2", "MACHINE_RANK": "1", "MASTER_ADDR": "10.0.0.1",
        "NUM_PROCESSES": "4",
    }  # fmt: skip
    stack = stack_of(environment)
    [trainer] = plan_parts(stack, ADDRESSES, {})
    assert trainer.log == Path("logs/as/demo_train_1.log")
    assert flag(trainer, "--main_process_ip") == "10.0.0.1"
    assert flag(trainer, "--machine_rank") == "1"
    assert stack.deployment.meeting_port == 29500
    with pytest.raises(ConfigError, match="DB_URL"):
        stack_of({"NUM_MACHINES": "2"})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NUM_SAMPLERS": "many"}, "NUM_SAMPLERS=many"),
        ({"NUM_PROCESSES": "-1"}, "NUM_PROCESSES=-1"),
        ({"NUM_PROCESSES": "0"}, "at least 1"),
        ({"SAMPLERS_ONLY": "maybe"}, "SAMPLERS_ONLY=maybe"),
        ({"MACHINE_RANK": "1"}, "below NUM_MACHINES"),
        ({"NUM_MACHINES": "2", "NUM_PROCESSES": "3"}, "multiple of NUM_MACHINES"),
        ({"NUM_MACHINES": "2", "MACHINE_RANK": "1"}, "set MASTER_ADDR to the address of machine 0"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000: must be 1 to 65535"),
    ],
)
def test_a_variable_with_a_wrong_value_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_deployment(environment)


def test_variables_and_flags_that_contradict_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="NUM_SERVICES=2 with INFERENCE_URLS=http://a:1,http://b"):
        stack_of({**ELSEWHERE, "NUM_SERVICES": "2"})
    assert stack_of({**ELSEWHERE, "NUM_SERVICES": "0"}).services == 0
    with pytest.raises(ConfigError, match=r"NUM_PROCESSES=8: 8 trainer processes on .* 4 GPU"):
        stack_of({"NUM_PROCESSES": "8"}, gpus=4)
    assert stack_of({"NUM_PROCESSES": "8"}, "--use_cpu", "true", gpus=4).trainers == 8
    with pytest.raises(ConfigError, match=r"--tp_size 2 x --cp_size 3 .* multiple of 6, it is 1"):
        stack_of({}, "--tp_size", "2", "--cp_size", "3")
    with pytest.raises(ConfigError, match="--inference_urls a:1: must begin with http://"):
        stack_of({"INFERENCE_URLS": "http://b:1,a:1"})


def test_an_unknown_flag_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--lerning_rate"):
        stack_of({}, "--lerning_rate", "1")


def test_threads_are_shared_out_unless_somebody_said_how_many() -> None:
    stack = stack_of({"NUM_PROCESSES": "2"})
    assert thread_environment(stack, 2, {}) == {"OMP_NUM_THREADS": "1"}
    assert thread_environment(stack, 12, {}) == {"OMP_NUM_THREADS": "4"}
    assert thread_environment(stack, 12, {"OMP_NUM_THREADS": "2"}) == {}


def test_gpus_are_counted_by_their_devices_and_what_is_visible(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0


def test_the_help_names_every_variable_of_the_scripts() -> None:
    described = describe_variables(read_deployment({"MODEL": "mine"}))
    interface = (
        "NUM_PROCESSES MACHINE_RANK NUM_MACHINES MASTER_ADDR MASTER_PORT MODEL TRAIN_FILE "
        "EVAL_FILE DB_URL MCP_URL INFERENCE_URLS NUM_SAMPLERS SAMPLERS_ONLY"
    )
    for name in interface.split():
        assert described[name]
    assert "(set: mine)" in described["MODEL"] and "(default: 0)" in described["MACHINE_RANK"]


def test_services_on_gpus_are_sglang_of_the_set_up_unless_the_local_engine_is_asked_for() -> None:
    service = parts_of(stack_of({}, gpus=2))["service"]
    assert flag(service, "--engine") == "sglang"
    assert flag(service, "--sglang_command").endswith(
        ".venv-sglang/bin/python -m sglang.launch_server"
    )
    local = parts_of(stack_of({"INFERENCE_ENGINE": "local"}, gpus=2))["service"]
    assert "--sglang_command" not in local.command
    assert (flag(local, "--device"), flag(local, "--inf_mem_ratio")) == ("cuda", "0.85")
    assert "--engine" not in parts_of(stack_of({}))["service"].command
    with pytest.raises(ConfigError, match="INFERENCE_ENGINE=vllm: must be sglang or local"):
        stack_of({"INFERENCE_ENGINE": "vllm"})


def test_services_are_sglang_where_a_command_starts_it() -> None:
    environment = {"SGLANG_COMMAND": "/opt/sglang/bin/python -m x", "NUM_SERVICES": "2"}
    flags = ["--inf_tp_size", "2", "--inf_mem_ratio", "0.5"]
    parts = parts_of(stack_of(environment, *flags, gpus=8))
    service = parts["service-1"]
    assert flag(service, "--engine") == "sglang"
    assert flag(service, "--sglang_command") == "/opt/sglang/bin/python -m x"
    assert service.environment["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert flag(service, "--inf_tp_size") == "2" and flag(service, "--inf_mem_ratio") == "0.5"
    assert "--memory_saver" not in service.command
    on_cpu = parts_of(stack_of(environment))["service-0"]
    assert flag(on_cpu, "--sglang_command") == "/opt/sglang/bin/python -m x"
    assert flag(on_cpu, "--dtype") == "float32"
    in_turns = parts_of(stack_of({"SGLANG_COMMAND": "x"}, gpus=1))
    assert "--memory_saver" in in_turns["service"].command
    assert flag(in_turns["sampler-0"], "--sync_sampling") == "true"
    assert flag(in_turns["trainer"], "--inf_share_gpus") == "true"
    for engine in (environment, {}):
        plain, in_float32 = (
            parts_of(stack_of(engine, *flags))["service" if not engine else "service-0"].command
            for flags in ([], ["--fp32_head", "true"])
        )
        assert "--fp32_head" not in plain and "--fp32_head" in in_float32
    with pytest.raises(ConfigError, match="set SGLANG_COMMAND"):
        stack_of({}, "--inf_tp_size", "2")
    stack_of(ELSEWHERE, "--inf_tp_size", "2")  # services of one's own: nothing to refuse


@pytest.mark.parametrize("rank", ["0", "1"])
def test_services_of_several_machines_listen_for_the_others_if_they_have_a_key(rank: str) -> None:
    environment = {
        "NUM_MACHINES": "2", "MACHINE_RANK": rank, "MASTER_ADDR": "first",
        "DB_URL": "mongodb://db:27017",
    }  # fmt: skip
    key = ["--inference_api_key_env", "KEY"]
    nodes = described("2x2x80")
    stack = plan_stack(GRPO, "demo", key, read_deployment(environment), nodes)
    service = parts_of(stack)["service"]
    assert flag(service, "--host") == "0.0.0.0"
    named = read_deployment({**environment, "NODE_ADDRESS": "10.0.0.7"})
    service = parts_of(plan_stack(GRPO, "demo", key, named, nodes))["service"]
    assert flag(service, "--public_url") == "http://10.0.0.7:7002"
    alone = parts_of(plan_stack(GRPO, "demo", [], read_deployment(environment), nodes))
    assert ("service" in alone) == (rank == "0")
    assert rank == "1" or "--host" not in alone["service"].command
