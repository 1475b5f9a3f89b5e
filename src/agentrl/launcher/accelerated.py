"""`accelerate launch ... src/main.py`, or `src/sampling.py`: processes that Accelerate starts.

The same command is started on each machine. The first process of a machine is its launch: it starts
the machine's services and samplers, and a trainer process with the rank that Accelerate gave it;
it ends them with the run, and reports on the first machine. Every other process is a trainer
process. `src/sampling.py` has no trainer, and fixed weights (`sampling_run.py`).

The flags have the original AgentRL's defaults (`configs/familiar/original_defaults.py`). The output
of a launch and of trainers goes where Accelerate's goes, which the scripts direct to
logs/as/RUN_train_RANK.log; the other parts have logs of their own beside it.
"""

import asyncio
import io
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, redirect_stderr
from dataclasses import replace
from typing import NoReturn
from urllib.parse import urlsplit

from agentrl.configs import ConfigError
from agentrl.configs.command_line import print_idle, run_parser
from agentrl.configs.familiar.original_defaults import ORIGIN, original_layer
from agentrl.configs.familiar.original_idle import idle_there
from agentrl.configs.flags import Value
from agentrl.configs.parsing import Layer, layers_given, merged
from agentrl.databases.connection import connect
from agentrl.databases.service_key import shared_key
from agentrl.launcher.agreed_figures import Meeting, agreed
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.deployment import (
    Deployment,
    count_gpus,
    read_deployment,
    usable_cores,
)
from agentrl.launcher.inventory import read_inventory
from agentrl.launcher.model_source import find_model
from agentrl.launcher.presets import SAMPLE, Preset, preset_layers
from agentrl.launcher.report import print_lines
from agentrl.launcher.run import start
from agentrl.launcher.sampling_run import add_samplers, sample_tasks
from agentrl.launcher.script_environment import (
    Place,
    environment_layers,
    forget_fsdp,
    not_followed,
)
from agentrl.launcher.stack import Stack, plan_layers, trainer_gpus
from agentrl.user_errors import is_user_error

MAIN = Preset(name="main", title="fixed by its flags", flags=())
_KEY_VARIABLE = "AGENTRL_SERVICE_KEY"
_IN_TURNS: dict[str, Value] = {"inf_share_gpus": True, "sync_sampling": True}
_PATIENCE_S = 60.0  # the wait for MongoDB before anything is started


def train(argv: Sequence[str]) -> NoReturn:
    """Be one process of `src/main.py`. Raises for bad input."""
    place = Place.read(os.environ)
    place.settle(os.environ)
    if place.local_rank:
        _be_a_trainer(_planned_silently(argv, place))
    stack, told = _planned(argv, place)
    forget_fsdp(os.environ)
    print_lines(TerminalConsole(), told)
    sys.exit(start(replace(stack, own_rank=True), MAIN))


def _planned_silently(argv: Sequence[str], place: Place) -> Stack:
    """`_planned`, in a process beside the first one of a machine, which tells the user."""
    try:
        with redirect_stderr(io.StringIO()):
            return _planned(argv, place)[0]
    except Exception as error:
        if not is_user_error(error):
            raise
        sys.exit(2)


def _planned(argv: Sequence[str], place: Place) -> tuple[Stack, list[str]]:
    """The parts of this machine, and lines for the user. All processes plan the same."""
    layers = given_layers(argv, os.environ, "src/main.py")
    inventory = read_inventory(os.environ, place.machines)
    if inventory.gpus and place.processes > 1:
        inventory = agreed(inventory, Meeting.of_processes(place, os.environ))
    deployment = read_deployment(place.variables(os.environ, len(inventory.gpus)))
    if place.machines > 1 and not merged(layers).get("inference_api_key_env"):
        layers = [*layers, _shared_key(merged(layers))]
        deployment = replace(deployment, node_address=_own_address(deployment))
    layers, told = shared_gpus(layers, len(inventory.gpus), place.processes_here)
    run = str(merged(layers)["run_name"])
    stack = plan_layers(MAIN, run, layers, deployment, inventory, usable_cores())
    return stack, [*not_followed(os.environ), *told]


def shared_gpus(layers: list[Layer], gpus: int, processes: int) -> tuple[list[Layer], list[str]]:
    """The flags for a machine of `gpus` with so many trainer `processes`, and lines for the user.

    There services have the trainer's GPUs. So they have here where every GPU trains.
    """
    given = merged(layers)
    told = []
    if gpus == processes and "inference_urls" not in given:
        layers = [Layer(ORIGIN, _IN_TURNS), *_without("inf_mem_ratio", layers)]
        told.append(
            "every GPU trains, so that trainer and services take turns on them: nothing is sampled "
            "during a step, and --inf_mem_ratio is what the trainer leaves between steps (or give "
            "fewer --num_processes)"
        )
    elif not gpus and "inf_mem_ratio" in given:
        layers = _without("inf_mem_ratio", layers)
        told.append("--inf_mem_ratio: has nothing to do on this machine, which has no GPU")
    return layers, told


def sample(argv: Sequence[str]) -> int:
    """Be one process of `src/sampling.py`; returns its exit status. Raises for bad input.

    The first process of the first machine feeds the run. The first one of each machine starts the
    services and samplers there; the others have nothing to do.
    """
    place = Place.read(os.environ)
    if place.local_rank:
        return 0
    layers = given_layers(argv, os.environ, "src/sampling.py")
    values = merged(layers)
    if values.get("train_file") is None:
        raise ConfigError("src/sampling.py: --train_file is needed, the tasks to sample")
    deployment = read_deployment(place.variables(os.environ, count_gpus(os.environ)))
    if place.machines > 1 and not values.get("inference_api_key_env"):
        layers = [*layers, _shared_key(values)]
        deployment = replace(deployment, node_address=_own_address(deployment))
    layers = [*preset_layers(SAMPLE, 1, demo=False), *layers]
    if count_gpus(os.environ) == 0:
        layers = _without("inf_mem_ratio", layers)
    source = find_model(str(values["model_name_or_path"]))
    if place.machine:
        return add_samplers(layers, source, deployment)
    return sample_tasks(layers, source, deployment)


def given_layers(argv: Sequence[str], environment: Mapping[str, str], command: str) -> list[Layer]:
    """The flags of a script of the original: its defaults, the environment's and the given ones.

    Flags that have no effect beside others are left out, with a line that says why.
    `command`: the program, for messages. Raises `ConfigError` without a model, or if run and
    database have different names.
    """
    given = run_parser(command).parse(argv)
    own = layers_given(given.values, given.files, environment_layers(environment))
    values = merged(own)
    if values.get("model_name_or_path") is None:
        raise ConfigError(f"{command}: --model_name_or_path is needed, the model to train")
    idle = idle_there({**original_layer(values), **values})
    print_idle([f"--{name}: {why}" for name, why in idle.items()])
    for name in idle:
        own = _without(name, own)
    values = merged(own)
    named = {"run_name": _run_name(values)}
    return [Layer(ORIGIN, original_layer(values)), *own, Layer("command line", named)]


def _without(flag: str, layers: Sequence[Layer]) -> list[Layer]:
    """The layers without a flag."""
    return [
        replace(layer, values={name: v for name, v in layer.values.items() if name != flag})
        for layer in layers
    ]


def _run_name(values: Mapping[str, object]) -> str:
    """The run's name: `--run_name`, or that of the database in `--db_connection_string`."""
    url = values.get("db_connection_string")
    database = urlsplit(str(url)).path.strip("/") if url else ""
    name = values.get("run_name")
    if name is not None and database and database != name:
        raise ConfigError(
            f"--run_name {name}: the run's database has its name, and --db_connection_string names "
            f"{database!r}: give both the same name"
        )
    return str(name or database or "run")


def _shared_key(values: Mapping[str, object]) -> Layer:
    """The flag of the services' key, which all machines of the run find in its database."""
    url = values.get("db_connection_string")
    if url is None:
        raise ConfigError(
            "--db_connection_string: several machines share a run through its MongoDB, so give one "
            "that all of them reach"
        )

    async def key() -> str:
        database = await connect(str(url), str(values["run_name"]), _PATIENCE_S)
        try:
            return await shared_key(database)
        finally:
            await database.close()

    os.environ[_KEY_VARIABLE] = asyncio.run(key())
    return Layer("several machines", {"inference_api_key_env": _KEY_VARIABLE})


def _own_address(deployment: Deployment) -> str:
    """NODE_ADDRESS, or the address by which this machine reaches the first one."""
    if deployment.node_address:
        return deployment.node_address
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect((deployment.master_addr or "127.0.0.1", deployment.master_port or 29500))
        return str(probe.getsockname()[0])


def _be_a_trainer(stack: Stack) -> NoReturn:
    forget_fsdp(os.environ)
    os.environ.update(trainer_gpus(stack))
    from agentrl.training.trainer import run_process

    flags = list(stack.flags)
    if stack.mongod:  # only the first process asks it
        flags += ["--db_connection_string", "mongodb://of-the-first-process"]
    run_process(flags)
