"""`agentrl launch`: checks flags, files and services, then starts the run."""

import asyncio
import os
from collections.abc import Sequence

from agentrl.configs import ConfigError, check_traces, trackers_of, trainable_folder
from agentrl.configs.flags import FLAGS, holds_secret
from agentrl.configs.parsing import COMMAND_LINE, read_flags, recorded
from agentrl.configs.secret_variables import VARIABLES
from agentrl.launcher import launch_help
from agentrl.launcher.agreed_figures import Meeting, agreed
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.deployment import Deployment, read_deployment, usable_cores
from agentrl.launcher.gpu_plan import plan_lines, step_line
from agentrl.launcher.inventory import read_inventory
from agentrl.launcher.launch import Launch
from agentrl.launcher.preflight import (
    TaskFileCheck,
    bytes_needed,
    check_database,
    check_lengths,
    check_model,
    check_output,
    check_tasks,
    check_tools,
)
from agentrl.launcher.presets import PRESETS, Preset
from agentrl.launcher.receiver_checks import check_trace_receiver, check_trackers
from agentrl.launcher.report import next_steps, print_lines
from agentrl.launcher.run_folder import (
    LaunchRecord,
    RunLock,
    read_launch,
    steps_finished,
)
from agentrl.launcher.run_parts import LOGS
from agentrl.launcher.service_checks import check_services
from agentrl.launcher.sglang_setup import set_up_sglang
from agentrl.launcher.stack import Stack, plan_samplers, plan_stack, sampler_flags
from agentrl.rollout.scheduling.joining import join
from agentrl.training.run.entry import data_of, read_mark, refuse_other_data


def main(argv: Sequence[str]) -> int:
    """Run `agentrl launch PRESET RUN [flags]`; returns the exit status. Raises for bad input."""
    if {"-h", "--help"} & {*argv}:
        return launch_help.main(argv)
    if not argv or argv[0] not in PRESETS:
        raise ConfigError(f"choose a preset: agentrl launch {' | '.join(PRESETS)} RUN")
    preset, rest = PRESETS[argv[0]], list(argv[1:])
    command = launch_help.typed_command(preset)
    if not rest or rest[0].startswith("-"):
        raise ConfigError(f"the run has no name: {command} RUN [--flag value ...]")
    deployment = read_deployment(os.environ)
    if deployment.samplers_only:
        return _add_samplers(preset, rest[0], rest[1:], deployment, command)
    inventory = read_inventory(os.environ, deployment.num_machines)
    if inventory.gpus and deployment.num_machines > 1:
        _tell(f"planning with the other machines of {deployment.num_machines}")
        inventory = agreed(inventory, Meeting.of_launches(deployment))
    stack = plan_stack(preset, rest[0], rest[1:], deployment, inventory, command, usable_cores())
    return start(stack, preset)


def start(stack: Stack, preset: Preset) -> int:
    """Check a planned launch and run it to its end; returns the exit status. Raises for bad
    input."""
    run = stack.config.run.run_name
    if stack.placement is not None:
        lines = [*plan_lines(stack.placement), step_line(stack.placement, stack.config)]
        print_lines(TerminalConsole(), lines)
    checks = check_start(stack)
    if stack.is_first_machine:
        _refuse_other_data(stack)
    if not _is_finished(stack):
        if stack.is_first_machine:
            check_trackers(stack.config, _tell)
        try_services(stack, checks)
        if stack.services:
            set_up_sglang(stack.deployment.service_command(stack.gpus))
    with RunLock(stack.config.output, stack.deployment.machine_rank) as lock:
        if not stack.is_first_machine:
            return asyncio.run(Launch(stack, preset, lock=lock, checks=checks).run())
        if _is_finished(stack):
            if stack.config.run.change_data:
                raise ConfigError(
                    f"--change_data: run {run} has all its {stack.config.optimizer.max_steps} "
                    "steps; give it more with --max_steps to go on with other data"
                )
            console = TerminalConsole()
            print_lines(
                console,
                [
                    f"run {run} is finished: its report is in {stack.config.output}; to "
                    f"continue, give a larger --max_steps than {stack.config.optimizer.max_steps}",
                    "",
                ],
            )
            print_lines(console, next_steps(stack.config, preset.script))
            return 0
        record = launch_record(preset, stack)
        return asyncio.run(Launch(stack, preset, lock=lock, record=record, checks=checks).run())


def launch_record(preset: Preset, stack: Stack) -> LaunchRecord:
    """What the folder of the run will say of this launch, and of those before it."""
    before = read_launch(stack.config.output)
    flags, withheld = recorded(stack.flags)
    return LaunchRecord(
        preset.name,
        flags,
        withheld=withheld,
        seconds=before.seconds if before else 0.0,
        demo_tools=stack.tools,
        origins=stack.origins,
        held_out=before.held_out if before else [],
    )


def _add_samplers(
    preset: Preset, run: str, user_flags: Sequence[str], deployment: Deployment, command: str
) -> int:
    """Start samplers for a run on other machines, with the flags from its database."""
    flags = sampler_flags(run, user_flags, deployment, command)
    stack = plan_samplers(flags, asyncio.run(join(flags, command)), deployment, usable_cores())
    try_services(stack, check_start(stack))
    return asyncio.run(Launch(stack, preset).run())


def _refuse_other_data(stack: Stack) -> None:
    """Raise `ConfigError` if the run's folder says that it began with other data.

    The database has the same information, but it is not started yet, and never for a finished run.
    """
    mark = read_mark(stack.config.output)
    if mark is not None:
        now = data_of(stack.config, mark.data, demo_tools=stack.tools)
        refuse_other_data(stack.config, mark.data, now)


def check_start(stack: Stack) -> list[TaskFileCheck]:
    """Check model, tools, task files and folders of this machine, and print warnings.

    Returns the checks of task files if a trainer is started; that of a large file continues while
    the run begins. Raises `ConfigError`, `AgentModelsError` or `TaskFileError`.
    """
    config = stack.config
    check_database(config)
    trackers_of(config.run.report_to)
    check_traces(config.run)
    model = check_model(config.model.model_name_or_path)
    if stack.trainers:
        trainable_folder(str(model), "MODEL or --model_name_or_path")
    if not stack.trainers and not stack.samplers:
        raise ConfigError("nothing to start: SAMPLERS_ONLY=1 with --enable_sampling false")
    if stack.samplers:
        check_tools(config)
    check_output(LOGS, 0)
    checks: list[TaskFileCheck] = []
    if stack.trainers or stack.feeds:
        checks = check_tasks(config)
        check_output(config.output, bytes_needed(model, config.checkpoint.save_total_limit))
    doubts = [doubt for check in checks for doubt in check.found.doubts]
    print_lines(TerminalConsole(), [*_shown_secrets(stack), *check_lengths(config, model), *doubts])
    return checks


def _shown_secrets(stack: Stack) -> list[str]:
    """A warning for each secret on the command line, which other users can read."""
    return [
        f"--{name} holds a secret, and every user of this machine can read a command line: give it "
        f"as {VARIABLES[name]} instead"
        for name, value in read_flags(stack.flags).values.items()
        if stack.origins.get(name) == COMMAND_LINE
        and name in VARIABLES
        and holds_secret(FLAGS[name], value)
    ]


def try_services(stack: Stack, checks: Sequence[TaskFileCheck]) -> None:
    """Check that external services answer. Raises `ConfigError` or `ToolServerUnreachable`."""
    agent = stack.config.agent
    check_services(stack.config, _tell)
    check_trace_receiver(stack.config, _tell)
    if stack.samplers and (agent.mcp_manager_url or agent.agent_config_path):
        # Imported here: the MCP SDK loads slowly, and most first runs have no such services.
        from agentrl.launcher import probes

        kinds = [kind for check in checks for kind in check.found.kinds]
        probes.try_services(stack.config, kinds, _tell)


def _tell(told: str) -> None:
    print_lines(TerminalConsole(), [told])


def _is_finished(stack: Stack) -> bool:
    """Whether the run has taken all its `--max_steps`."""
    if not stack.trainers or stack.config.checkpoint.resume_from_checkpoint == "false":
        return False
    steps = steps_finished(stack.config.output)
    return steps is not None and steps >= stack.config.optimizer.max_steps
