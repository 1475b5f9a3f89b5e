"""`agentrl launch`: what the user asked for, checked as a whole before anything is started."""

import asyncio
import os
from collections.abc import Sequence

from rich.console import Console

from agentrl.configs import ConfigError, config_parser
from agentrl.launcher.deployment import count_gpus, describe_variables, read_deployment
from agentrl.launcher.launch import Launch
from agentrl.launcher.preflight import (
    bytes_needed,
    check_model,
    check_output,
    check_tasks,
    check_tools,
)
from agentrl.launcher.presets import PRESETS, Preset
from agentrl.launcher.report import next_steps, print_lines
from agentrl.launcher.run_folder import (
    LaunchRecord,
    RunLock,
    read_launch,
    steps_finished,
)
from agentrl.launcher.run_parts import LOGS
from agentrl.launcher.stack import Stack, plan_stack


def main(argv: Sequence[str]) -> int:
    """`agentrl launch PRESET RUN [flags]`; returns the exit status. Raises for bad input."""
    if argv and argv[0] in ("-h", "--help"):
        print(
            f"agentrl launch {' | '.join(PRESETS)} RUN [--flag value ...]   starts a run\n\n"
            f"`agentrl launch {next(iter(PRESETS))} --help` lists variables and flags"
        )
        return 0
    if not argv or argv[0] not in PRESETS:
        raise ConfigError(f"say what to train with: agentrl launch {' | '.join(PRESETS)} RUN")
    preset, rest = PRESETS[argv[0]], list(argv[1:])
    if "--help" in rest or "-h" in rest:
        _print_help(preset)
        return 0
    if not rest or rest[0].startswith("-"):
        raise ConfigError(f"the run has no name: ./{preset.script} RUN [--flag value ...]")
    stack = plan_stack(
        preset, rest[0], rest[1:], read_deployment(os.environ), count_gpus(os.environ)
    )
    print_lines(Console(), _check(stack))
    if not stack.trainers:
        return asyncio.run(Launch(stack, preset).run())
    with RunLock(stack.config.output, stack.deployment.machine_rank) as lock:
        if not stack.is_first_machine:
            return asyncio.run(Launch(stack, preset, lock=lock).run())
        if _is_finished(stack):
            console = Console()
            console.print(f"run {rest[0]} is finished: its report is in {stack.config.output}\n")
            print_lines(console, next_steps(stack.config, preset.script))
            return 0
        before = read_launch(stack.config.output)
        record = LaunchRecord(
            preset.name,
            stack.flags,
            seconds=before.seconds if before else 0.0,
            demo_tools=stack.tools,
            held_out=before.held_out if before else (),
        )
        return asyncio.run(Launch(stack, preset, lock=lock, record=record).run())


def _check(stack: Stack) -> list[str]:
    """Everything that can be wrong before a start; returns what is hardly meant, a sentence each.

    Raises `ConfigError` or `TaskFileError`.
    """
    config = stack.config
    model = check_model(config.model.model_name_or_path)
    if not stack.trainers and not stack.samplers:
        raise ConfigError("nothing to start: SAMPLERS_ONLY=1 with --enable_sampling false")
    if stack.samplers:
        check_tools(config)
    check_output(LOGS, 0)
    if not stack.trainers:
        return []
    doubts = check_tasks(config)
    check_output(config.output, bytes_needed(model, config.checkpoint.save_total_limit))
    return doubts


def _print_help(preset: Preset) -> None:
    print(f"./{preset.script} RUN [--flag value ...]   trains with {preset.title}\n")
    print(f"Environment variables:\n\n{describe_variables()}\n\nFlags:\n")
    config_parser(preset.script, "They go to the trainer and the samplers.").print_help()


def _is_finished(stack: Stack) -> bool:
    """Whether the run has all the steps that are asked for."""
    if stack.config.checkpoint.resume_from_checkpoint == "false":
        return False
    steps = steps_finished(stack.config.output)
    return steps is not None and steps >= stack.config.optimizer.max_steps
