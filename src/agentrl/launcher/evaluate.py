"""`agentrl eval`: evaluates a checkpoint on the held-out tasks; trajectories stay in the database.

It starts the same processes as a launch, except the trainer; the engine serves the checkpoint. Its
tasks belong to an evaluation with a negative number, because those of training are numbered by
step.
"""

import asyncio
import os
import tempfile
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from agentrl.configs import Config, ConfigError, parse_config
from agentrl.configs.parsing import Layer, as_words, config_of, layers_given, merged, read_flags
from agentrl.configs.verbs import eval_parser
from agentrl.databases import policies
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Split, epoch_places
from agentrl.databases.feeder import make_tasks
from agentrl.databases.services import acknowledge, live_services, register_urls
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger
from agentrl.databases.transitions import OPEN_TASKS
from agentrl.held_port import HeldPort
from agentrl.inference.engines import open_engines
from agentrl.inference.protocol import FRESH_VERSION, ServiceUnreachable
from agentrl.inference.weights.disk import DiskUpdater
from agentrl.inference.weights.updates import PublishedWeights, update_services
from agentrl.launcher.database import OpenDatabase, run_database
from agentrl.launcher.deployment import count_gpus, read_deployment, usable_cores
from agentrl.launcher.evaluation import (
    EvaluationReport,
    HeldOutFile,
    print_report,
    read_rollouts,
    summarise_rollouts,
    write_report,
)
from agentrl.launcher.preflight import (
    check_lengths,
    check_model,
    check_output,
    check_task_file,
)
from agentrl.launcher.presets import DEMO_TOOLS
from agentrl.launcher.processes import Change, Supervisor, last_lines
from agentrl.launcher.report import agentrl_command, print_lines, run_arguments
from agentrl.launcher.run_folder import LaunchRecord, RunLock, read_launch, refuse_withheld
from agentrl.launcher.run_parts import LOGS
from agentrl.launcher.service_checks import check_services
from agentrl.launcher.service_part import service_part
from agentrl.launcher.sglang_setup import set_up_sglang
from agentrl.rollout.scheduling.worker import sample
from agentrl.training.checkpoint.layout import CheckpointError, list_checkpoints, read_state
from agentrl.training.model.export import export_checkpoint

_TICK_S = 0.25
_LINE_EVERY_S = 5.0
_SHOWN_LOG_LINES = 12
_INTERRUPTED = 130


class EvaluationFailed(RuntimeError):
    """A part of the evaluation ended and is not restarted. The message is for the user."""


def main(argv: Sequence[str]) -> int:
    """`agentrl eval RUN [--checkpoint N] [flags]`; returns the exit status.

    Raises for bad input, before anything is started.
    """
    given = eval_parser().parse(argv)
    arguments = given.own
    _refuse_checkpoint_as_run(arguments.run)
    layers = layers_given(given.values, given.files, read_deployment(os.environ).layers)
    launch, layers = _launched(arguments.run, layers)
    flags = as_words(layers)
    config = config_of(merged(layers))
    checkpoint = _find_checkpoint(config, arguments.checkpoint)
    model = check_model(config.model.model_name_or_path)
    if not config.data.eval_file:
        raise ConfigError("no tasks to evaluate on: set EVAL_FILE or --eval_file to a task file")
    checked = check_task_file(config.data.eval_file, config)
    task_file = HeldOutFile.of(Path(config.data.eval_file))
    folder = config.output / "eval"
    check_services(config, lambda told: print_lines(Console(), [told]))
    check_output(LOGS, 0)
    check_output(folder, 2 * sum(file.stat().st_size for file in model.glob("*.safetensors")))
    console = Console()
    print_lines(console, [*check_lengths(config, model), *checked.doubts])
    with RunLock(config.output) as lock:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as scratch:
            exported = Path(scratch).resolve() / checkpoint.name
            try:
                export_checkpoint(checkpoint, model, exported)
            except CheckpointError as error:
                raise ConfigError(str(error)) from None
            evaluation = Evaluation(
                flags, checkpoint, exported, checked.tasks, task_file, launch.demo_tools, console
            )
            try:
                report = asyncio.run(evaluation.run(lock))
            except KeyboardInterrupt:
                report = None
            except EvaluationFailed as error:
                console.print(str(error), markup=False, highlight=False, soft_wrap=True)
                return 1
    if report is None:
        console.print("stopped before the end: nothing is reported")
        return _INTERRUPTED
    print_report(console, report)
    path = write_report(folder, report)
    show = f"{agentrl_command()} show {run_arguments(config)}"
    lines = [f"written to {path}", f"look at a trajectory: {show} --split eval"]
    if report.failed_rollouts:
        lines.append(f"look at what failed: {show} --failed")
    if report.most_failed:
        lines.append("most rollouts failed: the exit status is 1")
    print_lines(console, lines)
    return 1 if report.most_failed else 0


def _refuse_checkpoint_as_run(run: str) -> None:
    if list_checkpoints(Path(run).parent).count(Path(run)):
        name = read_state(Path(run)).run_name
        raise ConfigError(
            f"{run} is a checkpoint of run {name}: `agentrl eval {name} --checkpoint {run}` "
            "evaluates it"
        )


def _launched(run: str, given: Sequence[Layer]) -> tuple[LaunchRecord, list[Layer]]:
    """How the run was launched, and its flags under those `given`.

    Raises `ConfigError` if it never was.
    """
    given = [*given, Layer("command line", {"run_name": run})]
    output = config_of(merged(given)).output
    launch = read_launch(output)
    if launch is None:
        raise ConfigError(
            f"run {run!r} was never launched in {output}: is the name right, and is this the "
            "folder that it was launched in?"
        )
    refuse_withheld(launch, merged(given), launch.withheld)
    return launch, [read_flags(launch.flags, "the run's launch"), *given]


def _find_checkpoint(config: Config, wanted: str | None) -> Path:
    checkpoints = list_checkpoints(config.output)
    if wanted is None:
        if not checkpoints:
            raise ConfigError(f"{config.output} holds no checkpoint yet: train the run first")
        return checkpoints[-1]
    for checkpoint in checkpoints:
        if wanted in (checkpoint.name, checkpoint.name.removeprefix("checkpoint-")):
            return checkpoint
    if Path(wanted).is_dir():
        read_state(Path(wanted))  # says what it is, if it is no checkpoint
        return Path(wanted)
    known = ", ".join(checkpoint.name for checkpoint in checkpoints) or "none"
    raise ConfigError(f"--checkpoint {wanted}: no such checkpoint; {config.output} holds {known}")


@dataclass
class Evaluation:
    """One evaluation, from starting its parts to its report."""

    flags: Sequence[str]  # of the run; what is started here is added to them
    checkpoint: Path
    model: Path  # the checkpoint as a model folder
    tasks: Sequence[TaskLine]
    task_file: HeldOutFile
    demo_tools: bool  # use the demo's tools, unless tools are given
    console: Console

    async def run(self, lock: RunLock) -> EvaluationReport | None:
        """The report, or None if a signal stopped it. Raises `EvaluationFailed`."""
        config = parse_config(self.flags)
        supervisor = Supervisor(inherited=lock.fileno())
        with ExitStack() as ports:
            async with run_database(config, run_lives=False) as opened:
                try:
                    return await self._evaluate(supervisor, ports, opened)
                finally:
                    await supervisor.stop_all()

    async def _evaluate(
        self, supervisor: Supervisor, ports: ExitStack, opened: OpenDatabase
    ) -> EvaluationReport | None:
        database = opened.database
        latest = await policies.latest(database)
        version = latest.version + 1 if latest else 0
        config = self._start_parts(supervisor, ports, opened.url, version)
        await _while_alive(supervisor, self._bring_services(database, config, version))
        step = read_state(self.checkpoint).step
        await policies.publish(database, version, step, str(self.checkpoint))
        await policies.serve(database, version)
        epoch = await self._add_tasks(database, config.data.eval_rollouts)
        self.console.print(
            f"{self.checkpoint.name} on {len(self.tasks)} tasks of {self.task_file.path}, "
            f"{config.data.eval_rollouts} rollouts each",
            highlight=False,
        )
        progress = asyncio.create_task(self._print_progress(database, epoch))
        try:
            await _while_alive(supervisor, sample(config, evaluation=epoch))
        finally:
            progress.cancel()
            with suppress(asyncio.CancelledError):
                await progress
        if await _open_tasks(database, epoch):
            return None  # a signal told the sampler to stop
        try:
            return summarise_rollouts(
                database.name,
                self.checkpoint.name,
                step,
                epoch,
                await read_rollouts(database, epoch),
                self.task_file,
            )
        except ValueError as error:
            raise EvaluationFailed(
                f"{error}: `agentrl show {run_arguments(config)} --failed` says why"
            ) from None

    def _start_parts(
        self, supervisor: Supervisor, ports: ExitStack, url: str, version: int
    ) -> Config:
        """Start services unless some are given; returns the config with tools and all URLs.

        `ports`: holds theirs.
        """
        deployment = read_deployment(os.environ)
        flags = [
            *self.flags,
            "--db_connection_string", url,
            "--model_name_or_path", str(self.model),
        ]  # fmt: skip
        config = parse_config(flags)
        if self.demo_tools and config.agent.mcp_manager_url is None:
            config = parse_config([*flags, "--mcp_manager_url", DEMO_TOOLS])
        if not config.inference_urls:
            services = deployment.services
            threads = str(max(1, usable_cores() // (services + 1)))
            gpus = 0 if config.parallel.use_cpu else count_gpus(os.environ)
            command = deployment.service_command(gpus)
            set_up_sglang(command)
            for number in range(services):
                part = service_part(
                    config,
                    ports.enter_context(HeldPort()).number,
                    number=number if services > 1 else None,
                    gpus=gpus,
                    threads={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)},
                    sglang_command=command,
                    weight_version=version,
                )
                supervisor.start(part)
        return config

    async def _bring_services(self, database: RunDatabase, config: Config, version: int) -> None:
        """Wait for services, and load the checkpoint into those that have other weights.

        A service that cannot load it is not used. Raises `ServiceUnreachable`.
        """
        await register_urls(database, config.inference_urls)
        deadline = asyncio.get_running_loop().time() + config.sampling.startup_timeout
        reason = "none is registered"
        while asyncio.get_running_loop().time() < deadline:
            live = await live_services(database)
            behind = [service.url for service in live if service.weight_version != version]
            async with open_engines(behind, config.sampling.inference_api_key) as engines:
                outcomes = await update_services(
                    DiskUpdater(), engines, PublishedWeights(version, self.model)
                )
            for outcome in outcomes:
                reason = outcome.error or ""
                await acknowledge(database, outcome.url, version if outcome.ok else FRESH_VERSION)
            if len(live) > len([outcome for outcome in outcomes if not outcome.ok]):
                return
            await asyncio.sleep(_TICK_S)
        raise ServiceUnreachable(
            f"no inference service loaded the checkpoint within "
            f"{config.sampling.startup_timeout:.0f} s: {reason}"
        )

    async def _add_tasks(self, database: RunDatabase, rollouts: int) -> int:
        """Add the held-out tasks as an evaluation of its own; returns its number."""
        oldest = await database.tasks.find_one(
            {"split": Split.EVAL}, {"epoch": 1}, sort=[("group_order", 1)], hint="order"
        )
        epoch = min(oldest["epoch"] if oldest else 0, 0) - 1
        ledger = TaskLedger(database, owner="evaluation", lease_seconds=60, max_failures=1)
        order = range(len(self.tasks))
        await ledger.add(make_tasks(self.tasks, Split.EVAL, epoch, rollouts, order))
        return epoch

    async def _print_progress(self, database: RunDatabase, epoch: int) -> None:
        while True:
            await asyncio.sleep(_LINE_EVERY_S)
            done = len(self.tasks) - await _open_tasks(database, epoch)
            self.console.print(f"{done} of {len(self.tasks)} tasks", highlight=False)


async def _open_tasks(database: RunDatabase, epoch: int) -> int:
    """How many tasks of the evaluation are not finished."""
    return await database.tasks.count_documents(
        {
            "split": Split.EVAL,
            "group_order": epoch_places(epoch),
            "status": {"$in": OPEN_TASKS},
        },
        hint="state",
    )


async def _while_alive(supervisor: Supervisor, work: Coroutine[None, None, None]) -> None:
    """Do `work` as long as all parts live or come back. Raises `EvaluationFailed`."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            for event in supervisor.poll():
                if event.change == Change.LOST:
                    lines = last_lines(event.part.log, _SHOWN_LOG_LINES)
                    log = "".join(f"\n    {line}" for line in lines)
                    raise EvaluationFailed(f"{event.sentence}. The log ends:{log}")
            await asyncio.wait([task], timeout=_TICK_S)
        await task
    finally:
        task.cancel()
        await asyncio.wait([task])
