"""The evaluations of one `agentrl eval`: each model on each task file, one after the other.

Trajectories stay in the database of a run, which may be one of evaluations only. An evaluation that
was interrupted goes on; one that has ended is only reported, unless it is asked for again.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from agentrl.configs import Config, parse_config
from agentrl.configs.flags import Value
from agentrl.configs.parsing import config_of, given_values
from agentrl.databases import outages, policies
from agentrl.databases.connection import RunDatabase
from agentrl.databases.evaluations import begin_evaluation, handed_back, open_tasks
from agentrl.databases.server_time import server_time
from agentrl.databases.task_file import TaskLine
from agentrl.file_digest import Digest
from agentrl.held_port import HeldPort
from agentrl.launcher.database import OpenDatabase, run_database
from agentrl.launcher.deployment import read_deployment, usable_cores
from agentrl.launcher.endpoint import await_endpoint
from agentrl.launcher.evaluation import (
    EvaluationReport,
    HeldOutFile,
    read_rollouts,
    summarise_rollouts,
)
from agentrl.launcher.evaluation_setup import SetUp, unseen
from agentrl.launcher.fixed_weights import await_services, fixed_services
from agentrl.launcher.model_source import ModelSource
from agentrl.launcher.processes import Change, Supervisor, last_lines
from agentrl.launcher.report import print_lines, run_arguments
from agentrl.launcher.run_folder import RunLock
from agentrl.launcher.service_part import service_part
from agentrl.launcher.sglang_setup import set_up_sglang
from agentrl.rollout.llm.models import AgentModel
from agentrl.rollout.scheduling.breakers import WaitedLongEnough
from agentrl.rollout.scheduling.worker import sample
from agentrl.stop_signals import stop_signals

_TICK_S = 0.25
_LINE_EVERY_S = 5.0
_SHOWN_LOG_LINES = 12


class EvaluationFailed(RuntimeError):
    """A part of the evaluation ended and is not restarted. The message is for the user."""


@dataclass(frozen=True)
class Entrant:
    """What is evaluated, by its name in tables: a model, or a model behind an endpoint."""

    name: str
    model: ModelSource | AgentModel

    @property
    def digest(self) -> str:
        """Equal for equal weights, and for one name at one endpoint."""
        if isinstance(self.model, ModelSource):
            return self.model.digest
        digest = Digest()
        digest.part(f"{self.model.base_url} {self.model.model}".encode())
        return digest.text()

    @property
    def step(self) -> int:
        """Optimizer steps of its weights, as far as known."""
        return self.model.step if isinstance(self.model, ModelSource) else 0


@dataclass(frozen=True)
class TaskFileOf:
    """A task file of the evaluations, read."""

    file: HeldOutFile
    tasks: Sequence[TaskLine]


@dataclass(frozen=True)
class Evaluations:
    """All evaluations of one command.

    `flags`: of the run that holds them, as words; `set_up`: what of them makes trajectories.
    `own_run`: whether that run is one of evaluations only, which may begin now. `again`: evaluate
    anew what has been evaluated.
    """

    flags: Sequence[str]
    own_run: bool
    set_up: SetUp
    entrants: Sequence[Entrant]
    files: Sequence[TaskFileOf]
    again: bool
    console: Console

    async def run(self, lock: RunLock) -> list[EvaluationReport] | None:
        """The reports, or None if a signal stopped it. Raises `EvaluationFailed`."""
        config = parse_config(self.flags)
        reports: list[EvaluationReport] = []
        async with run_database(config, run_lives=False, may_begin=self.own_run) as opened:
            for entrant in self.entrants:
                numbers = [await self._begin(opened.database, entrant, file) for file in self.files]
                if not await self._sample(opened, lock, entrant, numbers):
                    return None
                for file, epoch in zip(self.files, numbers, strict=True):
                    reports.append(await self._report(opened.database, entrant, file, epoch))
        return reports

    async def _begin(self, database: RunDatabase, entrant: Entrant, tasks: TaskFileOf) -> int:
        return await begin_evaluation(
            database,
            tasks.tasks,
            model=entrant.name,
            model_digest=entrant.digest,
            task_digest=tasks.file.sha256,
            rollouts=self.set_up.rollouts,
            flags=self.set_up.flags,
            digests=self.set_up.digests,
            again=self.again,
        )

    async def _sample(
        self, opened: OpenDatabase, lock: RunLock, entrant: Entrant, numbers: Sequence[int]
    ) -> bool:
        """Sample the tasks that are open. Returns whether none is left."""
        waiting = [
            (file, epoch)
            for file, epoch in zip(self.files, numbers, strict=True)
            if await self._is_open(opened.database, entrant, file, epoch)
        ]
        if not waiting:
            return True
        supervisor = Supervisor(inherited=lock.fileno())
        with ExitStack() as held:
            try:
                config, endpoint = await self._serve(opened, supervisor, held, entrant)
                for file, epoch in waiting:
                    async with self._progress(partial(tasks_done, opened.database, file, epoch)):
                        await _while_alive(supervisor, _sample_one(config, epoch, endpoint))
                    if await open_tasks(opened.database, epoch):
                        return False  # a signal told the sampler to stop
                return True
            finally:
                await supervisor.stop_all()

    async def _is_open(
        self, database: RunDatabase, entrant: Entrant, tasks: TaskFileOf, epoch: int
    ) -> bool:
        n_open, n = await open_tasks(database, epoch), len(tasks.tasks)
        what = f"{entrant.name} on {n} tasks of {tasks.file.path}"
        if n_open == 0:
            hidden = unseen(parse_config(self.flags))
            if isinstance(entrant.model, AgentModel):
                hidden.append("behind --endpoint")
            when = f", as after a change {' or '.join(hidden)}, which is not seen" if hidden else ""
            told = f"{what}: evaluated before (--again evaluates it anew{when})"
        elif n_open < n:
            told = f"{what}: goes on, {n - n_open} are done"
        else:
            told = f"{what}, {self.set_up.rollouts} rollouts each"
        print_lines(self.console, [told])
        return n_open > 0

    async def _serve(
        self, opened: OpenDatabase, supervisor: Supervisor, held: ExitStack, entrant: Entrant
    ) -> tuple[Config, AgentModel | None]:
        """Bring services to the entrant's weights. Returns the flags for sampling from them, and
        the endpoint if that is asked instead, once it answers.

        `held`: what is held as long as they are needed. Raises `ConfigError` for an endpoint that
        does not answer.
        """
        flags = [*self.flags, "--db_connection_string", opened.url]
        if isinstance(entrant.model, AgentModel):
            config = parse_config(flags)
            patience_s = config.sampling.startup_timeout
            await await_endpoint(
                entrant.model, patience_s, lambda told: print_lines(self.console, [told])
            )
            return config, entrant.model
        latest = await policies.latest(opened.database)
        version = latest.version + 1 if latest else 0
        folder = parse_config(self.flags).output / "eval"
        folder.mkdir(exist_ok=True)
        scratch = held.enter_context(tempfile.TemporaryDirectory(prefix=".export-", dir=folder))
        model = entrant.model.as_folder(Path(scratch).resolve()).absolute()
        given = given_values([*flags, "--model_name_or_path", str(model)], "agentrl eval")
        config = config_of(given)
        self._start_services(supervisor, held, given, version)
        loading = await_services(opened.database, config, version, model)
        async with self._progress(partial(_loading, entrant.name, time.monotonic())):
            await _while_alive(supervisor, loading)
        await policies.publish(opened.database, version, entrant.step, str(entrant.model.path))
        await policies.serve(opened.database, version)
        return config, None

    def _start_services(
        self, supervisor: Supervisor, held: ExitStack, given: Mapping[str, Value], version: int
    ) -> None:
        """Start services unless some are given, and tell where they are. `given`: all flags."""
        deployment = read_deployment(os.environ)
        services = fixed_services(config_of(given), given, deployment)
        if not services.devices:
            return
        print_lines(self.console, services.lines)
        config = config_of({**given, **services.flags})
        threads = str(max(1, usable_cores() // (len(services.devices) + 1)))
        command = deployment.service_command(services.gpus)
        set_up_sglang(command)
        for number, devices in enumerate(services.devices):
            part = service_part(
                config,
                held.enter_context(HeldPort()).number,
                number=number if len(services.devices) > 1 else None,
                devices=devices,
                threads={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)},
                sglang_command=command,
                weight_version=version,
            )
            supervisor.start(part)

    async def _report(
        self, database: RunDatabase, entrant: Entrant, tasks: TaskFileOf, epoch: int
    ) -> EvaluationReport:
        rollouts = await read_rollouts(database, epoch)
        try:
            return summarise_rollouts(
                database.name,
                entrant.name,
                entrant.step,
                epoch,
                rollouts,
                tasks.file,
                {"model_digest": entrant.digest, **asdict(self.set_up)},
            )
        except ValueError as error:
            run = run_arguments(parse_config(self.flags))
            raise EvaluationFailed(
                f"{entrant.name}: {error}: `agentrl show {run} --failed` says why"
            ) from None

    @asynccontextmanager
    async def _progress(self, line: Callable[[], Awaitable[str]]) -> AsyncIterator[None]:
        """Print `line` every few seconds until the block ends."""

        async def print_lines_forever() -> None:
            while True:
                await asyncio.sleep(_LINE_EVERY_S)
                print_lines(self.console, [await line()])

        printing = asyncio.create_task(print_lines_forever())
        try:
            yield
        finally:
            printing.cancel()
            with suppress(asyncio.CancelledError):
                await printing


async def _loading(model: str, began: float) -> str:
    return f"services load {model}, for {time.monotonic() - began:.0f} s"


async def tasks_done(database: RunDatabase, tasks: TaskFileOf, epoch: int) -> str:
    """How many tasks are done, and what the others wait for."""
    n, n_open = len(tasks.tasks), await open_tasks(database, epoch)
    if n_open == 0:
        return f"{n} of {n} tasks"  # an outage may still be listed, and nobody waits for its end
    now = await server_time(database.client)
    troubles = [outage.sentence(now) for outage in await outages.current(database)]
    if not troubles and (again := await handed_back(database, epoch)) is not None:
        troubles = [again]
    return " | ".join([f"{n - n_open} of {n} tasks", *troubles])


async def _sample_one(config: Config, epoch: int, endpoint: AgentModel | None) -> None:
    try:
        await sample(config, evaluation=epoch, endpoint=endpoint, process="evaluation")
    except WaitedLongEnough as error:
        raise EvaluationFailed(f"{error}; the same command goes on from here") from None
    finally:
        # They would tell a sampler to stop that has ended.
        for number in stop_signals():
            asyncio.get_running_loop().remove_signal_handler(number)


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
