"""`agentrl launch`: what the user asked for, checked as a whole before anything is started."""

import asyncio
import os
from collections.abc import Sequence

from rich.console import Console

from agentrl.configs import ConfigError, check_tracker
from agentrl.databases.task_file import TaskFile
from agentrl.launcher import launch_help
from agentrl.launcher.deployment import count_gpus, read_deployment
from agentrl.launcher.launch import Launch
from agentrl.launcher.preflight import (
    bytes_needed,
    check_model,
    check_output,
    check_tasks,
    check_tools,
)
from agentrl.launcher.presets import PRESETS
from agentrl.launcher.report import next_steps, print_lines
from agentrl.launcher.run_folder import (
    LaunchRecord,
    RunLock,
    read_launch,
    steps_finished,
)
from agentrl.launcher.stack import LOGS, Stack, plan_stack


def main(argv: Sequence[str]) -> int:
    """`agentrl launch PRESET RUN [flags]`; returns the exit status. Raises for bad input."""
    if {"-h", "--help"} & {*argv}:
        return launch_help.main(argv)
    if not argv or argv[0] not in PRESETS:
        raise ConfigError(f"say what to train with: agentrl launch {' | '.join(PRESETS)} RUN")
    preset, rest = PRESETS[argv[0]], list(argv[1:])
    command = launch_help.typed_command(preset)
    if not rest or rest[0].startswith("-"):
        raise ConfigError(f"the run has no name: {command} RUN [--flag value ...]")
    deployment, gpus = read_deployment(os.environ), count_gpus(os.environ)
    stack = plan_stack(preset, rest[0], rest[1:], deployment, gpus, command)
    files = _check(stack)
    print_lines(Console(), [doubt for file in files for doubt in file.doubts])
    given = stack.config.agent
    elsewhere = given.mcp_manager_url or given.agent_config_path
    if elsewhere and stack.samplers and not _is_finished(stack):
        # Imported here: the MCP SDK takes a while, and most first runs have nothing to try.
        from agentrl.launcher.probes import try_services

        tasks = [task for file in files for task in file.tasks]
        try_services(stack.config, tasks, lambda told: print_lines(Console(), [told]))
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
        seconds = before.seconds if before else 0.0
        record = LaunchRecord(
            preset.name, stack.flags, seconds, demo_tools=stack.tools, origins=stack.origins
        )
        return asyncio.run(Launch(stack, preset, lock=lock, record=record).run())


def _check(stack: Stack) -> list[TaskFile]:
    """Everything that can be wrong before a start; returns the tasks, where there is a trainer.

    Raises `ConfigError` or `TaskFileError`.
    """
    config = stack.config
    check_tracker(config.run.report_to)
    model = check_model(config.model.model_name_or_path)
    if not stack.trainers and not stack.samplers:
        raise ConfigError("nothing to start: SAMPLERS_ONLY=1 with --enable_sampling false")
    if stack.samplers:
        check_tools(config)
    check_output(LOGS, 0)
    if not stack.trainers:
        return []
    files = check_tasks(config)
    check_output(config.output, bytes_needed(model, config.checkpoint.save_total_limit))
    return files


def _is_finished(stack: Stack) -> bool:
    """Whether the run has all the steps that are asked for."""
    if not stack.trainers or stack.config.checkpoint.resume_from_checkpoint == "false":
        return False
    steps = steps_finished(stack.config.output)
    return steps is not None and steps >= stack.config.optimizer.max_steps
