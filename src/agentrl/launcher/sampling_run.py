"""`agentrl sample --model MODEL --tasks FILE`: a run without a trainer, until its tasks are done.

It is a launch that feeds the run itself (`feeding.py`) and starts services and samplers, as one
with a trainer does. The run then has Records and rows like any other, of policy version 0.
"""

import asyncio
import os
from dataclasses import replace

from agentrl.configs import Config, ConfigError
from agentrl.configs.command_line import Given
from agentrl.configs.parsing import (
    Layer,
    as_words,
    config_of,
    layers_given,
    merged,
    origins_of,
)
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.deployment import (
    Deployment,
    default_sampler_processes,
    read_deployment,
    usable_cores,
)
from agentrl.launcher.feeding import FIXED_VERSION
from agentrl.launcher.fixed_weights import fixed_services
from agentrl.launcher.gpu_plan import ORIGIN
from agentrl.launcher.launch import Launch
from agentrl.launcher.model_source import ModelSource, find_model
from agentrl.launcher.presets import SAMPLE, preset_layers
from agentrl.launcher.report import print_lines
from agentrl.launcher.run import check_start, launch_record, try_services
from agentrl.launcher.run_folder import RunLock, last_checkpoint
from agentrl.launcher.sglang_setup import set_up_sglang
from agentrl.launcher.stack import Stack


def main(given: Given) -> int:
    """Sample the tasks; returns the exit status. Raises `ConfigError` for bad input."""
    deployment = read_deployment(os.environ)
    model, tasks = given.own.model, given.own.tasks
    values = merged([*deployment.layers, Layer("", given.values)])
    model, tasks = model or values.get("model_name_or_path"), tasks or values.get("train_file")
    if model is None or tasks is None:
        missing, other = ("--tasks", "--model") if tasks is None else ("--model", "--tasks")
        raise ConfigError(
            f"{missing} is needed beside {other}: both together begin a run without a trainer"
        )
    source = find_model(str(model))
    of_run = source.flags()
    own = layers_given(given.values, given.files, deployment.layers)
    layers = [*preset_layers(SAMPLE, 1, demo=False), *([of_run] if of_run else []), *own]
    layers.append(Layer("command line", {"train_file": str(tasks)}))
    return sample_tasks(layers, source, deployment)


def sample_tasks(layers: list[Layer], source: ModelSource, deployment: Deployment) -> int:
    """Sample `--train_file` with a model by the flags of `layers`, in the run of `--run_name`.

    Returns the exit status. Raises `ConfigError`, and the errors of a launch's checks.
    """
    values = merged(layers)
    if values.get("num_generations") == 1 and "advantage" not in values:
        # There is nothing to compare a trajectory with.
        layers = [*layers, Layer(SAMPLE.name, {"advantage": "score"})]
    output = config_of(merged(layers)).output
    if last_checkpoint(output) is not None:
        raise ConfigError(
            f"{output} is the folder of a run that was trained: give --run_name another name"
        )
    model = source.as_folder(output)
    layers = [*layers, Layer("--model", {"model_name_or_path": str(model)})]
    config = config_of(merged(layers))
    stack = _plan(config, layers, deployment)
    checks = check_start(stack)
    try_services(stack, checks)
    if stack.services:
        set_up_sglang(deployment.service_command(stack.gpus))
    with RunLock(config.output, deployment.machine_rank) as lock:
        record = launch_record(SAMPLE, stack)
        return asyncio.run(Launch(stack, SAMPLE, lock=lock, record=record, checks=checks).run())


def add_samplers(layers: list[Layer], source: ModelSource, deployment: Deployment) -> int:
    """Start services and samplers of a further machine for the run that `sample_tasks` feeds on the
    first; returns the exit status. Raises as it does."""
    model = source.as_folder(config_of(merged(layers)).output)
    layers = [*layers, Layer("--model", {"model_name_or_path": str(model)})]
    config = config_of(merged(layers))
    stack = replace(_plan(config, layers, deployment), feeds=False)
    check_start(stack)
    if stack.services:
        set_up_sglang(deployment.service_command(stack.gpus))
    with RunLock(config.output, deployment.machine_rank) as lock:
        return asyncio.run(Launch(stack, SAMPLE, lock=lock).run())


def _plan(config: Config, layers: list[Layer], deployment: Deployment) -> Stack:
    """The parts: a MongoDB if none is given, services on all GPUs if none are given, samplers.

    Tells where the services are.
    """
    services = fixed_services(config, merged(layers), deployment)
    print_lines(TerminalConsole(), services.lines)
    layers = [*layers, Layer(ORIGIN, services.flags)]
    cores, on_cpu = usable_cores(), services.devices and not services.gpus
    samplers = default_sampler_processes(cores, cores if on_cpu else 0)
    return Stack(
        config=config_of(merged(layers)),
        flags=tuple(as_words(layers)),
        origins=origins_of(layers),
        mongod=config.run.db_connection_string is None,
        tools=False,
        samplers=deployment.samplers(config.sampling.sampler_processes or samplers),
        trainers=0,
        gpus=services.gpus,
        deployment=deployment,
        service_devices=services.devices,
        feeds=True,
        weight_version=FIXED_VERSION,
    )
