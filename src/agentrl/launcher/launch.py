"""One launch: starts a stack's processes, watches them to the end of the run, stops and reports."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    nullcontext,
    suppress,
)
from dataclasses import replace
from urllib.parse import urlsplit

from pymongo.errors import PyMongoError
from rich.console import Console

from agentrl.configs import ConfigError
from agentrl.databases import runs
from agentrl.databases.connection import (
    PATIENCE_S,
    RunDatabase,
    connect,
    retry_through_outages,
)
from agentrl.databases.documents import InferenceService
from agentrl.databases.mongod import EmbeddedMongod, MongodError
from agentrl.databases.mongod_lock import opened_by
from agentrl.databases.runs import (
    FINISHED,
    HOPELESS,
    RunHopeless,
    TrainerReplaced,
    load_run,
)
from agentrl.databases.services import live_services
from agentrl.databases.task_file import TaskFileError
from agentrl.held_port import HeldPort
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.database import ended, mongod_of
from agentrl.launcher.deployment import usable_cores
from agentrl.launcher.ending import (
    FAILED,
    REFUSED,
    Outcome,
    Saved,
    failures_lines,
    last_lines_of,
    part_failed,
    stopped_by,
)
from agentrl.launcher.pages import Pages
from agentrl.launcher.preflight import TaskFileCheck
from agentrl.launcher.presets import Preset
from agentrl.launcher.processes import (
    RESTARTS,
    Change,
    DeathsInARow,
    Event,
    Kind,
    Part,
    Supervisor,
)
from agentrl.launcher.progress import ProgressReader, Snapshot, read_metrics
from agentrl.launcher.report import (
    gather_report,
    next_steps,
    print_lines,
    run_arguments,
    sampled_lines,
    write_summary,
)
from agentrl.launcher.run_folder import (
    LaunchRecord,
    RunLock,
    last_checkpoint,
    read_launch,
    write_launch,
)
from agentrl.launcher.run_parts import LOGS
from agentrl.launcher.stack import (
    Addresses,
    Stack,
    plan_parts,
    service_urls,
    thread_environment,
    with_urls,
)
from agentrl.launcher.view import LiveView, duration
from agentrl.stop_signals import StopRequest, stop_signals
from agentrl.training.run.entry import RunEntry, enter, settle

_TICK_S = 0.25
_READ_EVERY_S = 3.0  # the database is asked so often; a step takes longer than this
_LAST_READ_S = 2.0
_LOOK_S = 0.5  # between two looks for services that have begun
_SAVE_EVERY_S = 15.0
_MONGOD_SPACE = 64 << 20  # bytes: journal files, and some minutes of documents


class _Stopped(Exception):
    """A signal arrived before the parts were started."""


class Launch:
    """Everything that one call of a script starts. `record` is None where nothing is reported:
    on further machines, and where only samplers are added to a run. `checks`: of task files, which
    are read to their end while the run begins."""

    def __init__(
        self,
        stack: Stack,
        preset: Preset,
        lock: RunLock | None = None,
        record: LaunchRecord | None = None,
        console: Console | None = None,
        checks: Sequence[TaskFileCheck] = (),
    ) -> None:
        self._checks = checks
        self._stack = stack
        self._preset = preset
        self._record = record
        self._console = console or TerminalConsole()
        self._parts: Sequence[Part] = ()
        self._ended: tuple[Part, ...] = ()  # samplers, as if the run was finished
        self._too_early: tuple[Part, ...] = ()  # those of them that ended though it is not
        self._supervisor = Supervisor(inherited=lock.fileno() if lock else None)
        self._began = time.monotonic()
        self._stop = StopRequest()
        self._snapshot = Snapshot()
        self._mongod: EmbeddedMongod | None = None
        self._mongod_deaths = DeathsInARow(started=self._began)
        self._disk_full = False  # so that mongod cannot run
        self._given_up: int | None = None  # the trainer that had given the run up before
        self._entry: RunEntry | None = None
        self._ports = ExitStack()  # held as long as anything is started on them
        self._addresses = Addresses(
            service_ports=tuple(self._hold_port() for _ in range(stack.services)),
            trainer_port=stack.deployment.meeting_port,
        )

    async def run(self) -> int:
        """Run to the end; returns the exit status. Nothing is left running."""
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._interrupt, number)
        # Words are not torn apart in a terminal, and a log has it on one line.
        self._console.print(
            self._stack.line,
            markup=False,
            highlight=False,
            soft_wrap=not self._console.is_terminal,
        )
        database: RunDatabase | None = None
        pages = self._open_pages()
        try:
            database = await self._open_database()
            if self._record is not None:
                self._save(self._record)
            async with self._exposed(database):
                outcome = await self._train(database)
            if outcome.status == 0 and self._record is not None:
                await self._report(database)
                if self._snapshot.attempts.most_failed:
                    outcome = Outcome(FAILED)
            if self._record is not None:
                why = outcome.reason or self._snapshot.attempts.sentence or ""
                ended = why if outcome.status else ""
                self._save(replace(self._record, status=outcome.status, ended=ended))
        except _Stopped:
            outcome = self._stopped()
        except Exception as error:
            # What is refused before it begins says nothing about the run that is there.
            refused = database is None and isinstance(error, ConfigError)
            known = refused and read_launch(self._stack.config.output) is not None
            if self._record is not None and not known:
                self._save(replace(self._record, status=FAILED, ended=str(error)))
            raise
        finally:
            await self._supervisor.stop_all()
            if pages is not None:
                await pages.close()
            if database is not None:
                await database.close()
            if self._mongod is not None:
                self._mongod.stop()
            self._ports.close()
        # Only now: the trainer may have saved a checkpoint when it was stopped.
        print_lines(self._console, last_lines_of(outcome, self._saved))
        return outcome.status

    def _exposed(self, database: RunDatabase) -> AbstractAsyncContextManager[object]:
        """Serve the ledger's figures, if `--metrics_port` asks for it, and announce services.

        The first machine of a run does: further ones only announce theirs.
        """
        config = self._stack.config
        if config.run.metrics_port is None:
            return nullcontext()
        # Here: without the flag nothing of it is loaded.
        from agentrl.launcher.ledger_figures import LedgerFigures
        from agentrl.metrics.exposure import exposed
        from agentrl.metrics.targets import announced

        urls = service_urls(self._stack, self._addresses)
        services = {f"service-{number}": urlsplit(url).netloc for number, url in enumerate(urls)}
        if self._record is None:
            return announced(config, services)
        ledger = LedgerFigures(database)
        return exposed(config, "ledger", [ledger], refresh=ledger.refresh, beside=services)

    def _open_pages(self) -> Pages | None:
        """Open the port of the run's pages, and print their address."""
        config = self._stack.config
        if self._record is None or not config.run.view:
            return None
        try:
            pages = Pages(config, LOGS / f"{config.run.run_name}_view.log")
        except OSError as error:
            print_lines(self._console, [f"no pages about the run: {error}"])
            return None
        print_lines(self._console, [f"look at the run: {pages.address}"])
        return pages

    def _hold_port(self) -> int:
        return self._ports.enter_context(HeldPort()).number

    def _interrupt(self, number: int) -> None:
        """Stop gracefully at the first signal, and at once if it is repeated."""
        if self._stop.take(number):
            self._supervisor.kill_all()

    @property
    def _seconds(self) -> float:
        """Wall time in seconds of all launches of the run."""
        before = self._record.seconds if self._record else 0.0
        return before + time.monotonic() - self._began

    async def _open_database(self) -> RunDatabase:
        config = self._stack.config
        url = config.run.db_connection_string
        if self._stack.mongod:
            mongod = mongod_of(config)
            # In this thread, which lives as long as the launcher: mongod ends with its parent
            # thread.
            if (holder := opened_by(mongod.data_dir)) is not None:
                told = f"waiting for {holder}, which has the run's database open"
                print_lines(self._console, [told])
            url = mongod.begin()
            self._mongod = mongod
        assert url is not None
        located = with_urls(self._stack, url)
        threads = thread_environment(located, usable_cores(), os.environ)
        self._parts = plan_parts(located, self._addresses, threads)
        # They load for seconds, and need the database last.
        self._start_parts(Kind.SERVICE)
        if self._mongod is not None:
            self._mongod.await_ready()
        database = await self._connect(url)
        if self._stack.mongod:
            await runs.reopen(database)
        if self._record is not None:
            try:
                await self._enter(database)
            except BaseException:
                await database.close()
                raise
        before = await load_run(database)
        if before is not None and before.status == HOPELESS:
            self._given_up = before.fence
        self._stack = located  # only now: the run is entered with what the user gave
        return database

    def _start_parts(self, *kinds: Kind) -> None:
        for part in self._parts:
            if part.kind in kinds:
                self._supervisor.start(part)

    async def _connect(self, url: str) -> RunDatabase:
        """The run's database. Raises `_Stopped` if a signal comes before it answers."""
        config = self._stack.config
        patience = config.sampling.startup_timeout
        connecting = asyncio.create_task(connect(url, config.run.run_name, patience))
        while not connecting.done():
            await asyncio.wait({connecting}, timeout=_TICK_S)
            if self._stop.first is not None:
                connecting.cancel()
                await asyncio.wait({connecting})
                raise _Stopped
        return connecting.result()

    async def _enter(self, database: RunDatabase) -> None:
        """Check the run's identity, and print the flags that changed since the last start.

        Raises `ConfigError` if it is another run, `TrainerAlive` if it is trained elsewhere.
        """
        config = self._stack.config
        run = await load_run(database)
        if run is not None:
            runs.refuse_second_trainer(run)
        entry = await enter(database, config, demo_tools=self._stack.tools)
        await settle(database, config, entry)
        await runs.go_on(database)
        self._entry = entry
        step = last_checkpoint(config.output) or 0
        print_lines(self._console, [f"{change} (since step {step})" for change in entry.changes])

    async def _train(self, database: RunDatabase) -> Outcome:
        """Start trainer and samplers, and wait for the end of the run."""
        title = f"{self._stack.config.run.run_name} · {self._preset.title}"
        self._start_parts(Kind.SAMPLER)
        with LiveView(title, self._console, self._logs(self._parts)) as view:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGCONT, view.come_back)
            progress = ProgressReader(database, self._stack.config.output)
            reader = asyncio.create_task(self._read_progress(progress, view))
            reader.add_done_callback(lambda task: _tell_failure(task, view))
            checking = asyncio.create_task(self._check_on())
            feeding = asyncio.create_task(self._feed(database))
            starting = asyncio.create_task(self._start_trainer(database, view))
            starting.add_done_callback(lambda task: task.cancelled() or task.exception())
            try:
                while (outcome := self._judge(self._events(), view)) is None:
                    if starting.done():
                        starting.result()
                    if checking.done() and (mistakes := checking.result()) is not None:
                        outcome = mistakes
                        break
                    if feeding.done() and (fed := feeding.result()) is not None:
                        outcome = fed
                        break
                    self._show(view)
                    await asyncio.sleep(_TICK_S)
                starting.cancel()
                if self._stop.first is not None:
                    saved = ", with a checkpoint" if self._stack.trainers else ""
                    view.notice(
                        f"stopping in order{saved}; the same signal again ends everything at once"
                    )
                stopping = asyncio.create_task(self._supervisor.stop_all())
                while not stopping.done():
                    self._show(view)
                    await asyncio.wait({stopping}, timeout=_TICK_S)
                stopping.result()
            finally:
                loop.remove_signal_handler(signal.SIGCONT)
                beside = (reader, checking, feeding, starting)
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
            # The final state stays on the screen. An unreachable database is not waited for.
            with suppress(PyMongoError, TimeoutError):
                async with asyncio.timeout(_LAST_READ_S):
                    self._snapshot = await progress.read()
            self._show(view, last=True)
        if outcome.status == 0 and self._record is not None:
            return await self._check_finished(database)
        if outcome.status and self._stop.first is None:
            return await self._hopeless(database) or outcome
        return outcome

    async def _start_trainer(self, database: RunDatabase, view: LiveView) -> None:
        """Start the trainer, which waits for services that it takes turns with.

        They measure what is free on the GPUs, and hold it before the trainer has any.
        """
        config = self._stack.config
        if self._stack.trainers and self._stack.services and config.services.inf_share_gpus:
            view.notice("the trainer starts when the services, whose GPUs it shares, have begun")
            urls = set(service_urls(self._stack, self._addresses))
            with suppress(TimeoutError):  # the trainer says what is the matter
                async with asyncio.timeout(config.sampling.startup_timeout):
                    while not urls <= {each.url for each in await self._registered(database)}:
                        await asyncio.sleep(_LOOK_S)
        self._start_parts(Kind.TRAINER)

    async def _registered(self, database: RunDatabase) -> list[InferenceService]:
        return await retry_through_outages(lambda: live_services(database), "the services")

    async def _check_on(self) -> Outcome | None:
        """Check large task files to their end. Returns an outcome if one has mistakes."""
        try:
            for check in self._checks:
                await check.go_on()
        except TaskFileError as error:
            mend = "mend the file, then, with --change_data added, "
            return Outcome(REFUSED, f"the run ends for its tasks:\n{error}\n", first=mend)
        return None

    async def _feed(self, database: RunDatabase) -> Outcome | None:
        """Feed a run without a trainer to its end; None at once for any other."""
        if not self._stack.feeds:
            return None
        assert self._entry is not None, "the run was not entered"
        # Imported here: it loads torch, which a launch with a trainer leaves to its parts.
        from agentrl.launcher.feeding import feed

        try:
            await feed(database, self._stack.config, self._entry)
        except (RunHopeless, TrainerReplaced) as error:
            return Outcome(FAILED, str(error))
        return Outcome(0)

    async def _hopeless(self, database: RunDatabase) -> Outcome | None:
        """The outcome with the trainer's reason, if it has declared the run hopeless."""
        try:
            run = await load_run(database)
        except PyMongoError:
            return None  # the database has failed, which is reported separately
        if run is None or run.status != HOPELESS or run.fence == self._given_up:
            return None
        mend = "fix that first (other tasks or another model make another run), then "
        return Outcome(FAILED, str(run.failure), first=mend)

    def _show(self, view: LiveView, *, last: bool = False) -> None:
        alive = self._supervisor.alive(Kind.SAMPLER)
        expected = self._supervisor.expected(Kind.SAMPLER)
        view.show(self._snapshot, self._seconds, (alive, expected), now=last)

    def _logs(self, parts: Sequence[Part]) -> str:
        """The log files of the parts, short: `logs/as/RUN_*.log (train_0, sample-0)`."""
        run = f"{self._stack.config.run.run_name}_"
        logs = [part.log for part in parts if part.log is not None]
        if self._mongod is not None:
            logs.append(self._mongod.log_file)
        names = ", ".join(log.stem.removeprefix(run) for log in logs)
        return f"{LOGS}/{run}*.log ({names})"

    async def _check_finished(self, database: RunDatabase) -> Outcome:
        """The outcome after the trainer's exit status 0, which a stopped trainer has too."""
        run = await load_run(database)
        if run is not None and run.status == FINISHED:
            return Outcome(0)
        return Outcome(FAILED, "the trainer was stopped before the end of the run")

    def _stopped(self) -> Outcome:
        assert self._stop.first is not None
        return stopped_by(self._stop.first)

    @property
    def _saved(self) -> Saved | None:
        """The stored state of the run; None if this launch does not report on it."""
        if self._record is None:
            return None
        config, snapshot = self._stack.config, self._snapshot
        drain = config.sampling.drain_seconds
        return Saved(
            run_arguments(config), config.output, snapshot.step, drain, snapshot.attempts,
            trains=not self._stack.feeds,
        )  # fmt: skip

    def _events(self) -> list[Event]:
        """What became of parts since the last call. Samplers that ended too early are started
        again: without them the trainer would wait for ever."""
        again = [self._supervisor.revive(part) for part in self._too_early]
        self._too_early = ()
        events = self._supervisor.poll()
        if self._stack.trainers:
            done = (event.part for event in events if event.change == Change.DONE)
            self._ended += tuple(part for part in done if part.kind == Kind.SAMPLER)
        return again + events

    def _judge(self, events: Sequence[Event], view: LiveView) -> Outcome | None:
        """The outcome if the run has ended, by the events of its parts; else None."""
        if self._stop.first is not None:
            return self._stopped()
        for event in events:
            if event.part.kind == Kind.TRAINER:
                return Outcome(0) if event.change == Change.DONE else part_failed(event)
            if event.change == Change.LOST and not self._supervisor.expected(event.part.kind):
                return part_failed(event)
            if event.change != Change.DONE:
                view.notice(event.sentence)
        ends_itself = self._stack.trainers or self._stack.feeds
        if not ends_itself and not self._supervisor.expected(Kind.SAMPLER):
            return Outcome(0)  # samplers were added to a run, and it is finished
        if self._mongod is not None and (self._disk_full or ended(self._mongod)):
            return self._start_again(self._mongod, view)
        return None

    def _start_again(self, mongod: EmbeddedMongod, view: LiveView) -> Outcome | None:
        """Restart a mongod that died, at the same address; the parts wait for it.

        If its disk is full, the restart waits until space is free, as long as the parts wait.
        """
        mongod.stop()
        if shutil.disk_usage(mongod.data_dir).free < _MONGOD_SPACE:
            if not self._disk_full:
                view.notice(
                    f"mongod ended, because the disk of {mongod.data_dir} is full: it is started "
                    f"again once {_MONGOD_SPACE >> 20} MB are free (the run waits "
                    f"{PATIENCE_S / 60:.0f} minutes)"
                )
            self._disk_full = True
            return None
        self._disk_full = False
        if self._mongod_deaths.died(time.monotonic()) > RESTARTS:
            return Outcome(
                FAILED,
                f"mongod ended {RESTARTS + 1} times, see {mongod.log_file}",
            )
        view.notice(f"mongod ended: it is started again (log: {mongod.log_file})")
        try:
            # In this thread, and the view stands still meanwhile: see _open_database.
            mongod.start()
        except MongodError as error:
            return Outcome(FAILED, str(error))
        self._mongod_deaths.started = time.monotonic()
        return None

    async def _read_progress(self, reader: ProgressReader, view: LiveView) -> None:
        """Update the snapshot and `launch.json`. The run does not depend on it."""
        silent = False
        saved = time.monotonic()
        while True:
            # Samplers that end later may know what this look does not show yet.
            ended, self._ended = self._ended, ()
            try:
                self._snapshot = await reader.read()
                silent = False
                if self._snapshot.status != FINISHED:
                    self._too_early += ended
            except PyMongoError as error:
                self._ended += ended
                if not silent:
                    view.notice(f"MongoDB does not answer: {error}"[:200])
                silent = True
            if self._record is not None and time.monotonic() - saved > _SAVE_EVERY_S:
                self._save(self._record)
                saved = time.monotonic()
            await asyncio.sleep(_READ_EVERY_S)

    def _save(self, record: LaunchRecord) -> None:
        """Store the launch's record with the run's progress."""
        found = [evaluation.success for evaluation in self._snapshot.held_out]
        now = replace(
            record,
            seconds=self._seconds,
            max_steps=self._snapshot.max_steps or record.max_steps,
            held_out=[found[0], found[-1]] if found else record.held_out,
        )
        write_launch(self._stack.config.output, now)

    async def _report(self, database: RunDatabase) -> None:
        """Write the report and print its summary."""
        # Imported here: matplotlib is needed at the end only.
        from agentrl.launcher.curve import draw_curve
        from agentrl.launcher.training_curves import draw_training

        config = self._stack.config
        assert self._record is not None
        if self._stack.feeds:
            print_lines(self._console, await sampled_lines(database, config, self._seconds))
            return
        report = await gather_report(database, config.output, self._seconds)
        self._save(self._record)
        curve = draw_curve(config.output, config.run.run_name, report)
        metrics = read_metrics(config.output / "metrics.jsonl")
        training = draw_training(config.output, config.run.run_name, metrics)
        summary = write_summary(config.output, report.summary)
        s = report.summary
        held_out = ""
        if s.eval_before is not None and s.eval_after is not None:
            held_out = f", held-out success {s.eval_before:.3f} → {s.eval_after:.3f}"
        print_lines(
            self._console,
            [
                "",
                f"{config.run.run_name}: {s.steps} steps in {duration(s.seconds)}{held_out}",
                *failures_lines(self._snapshot.attempts, run_arguments(config)),
                f"report: {summary}, {curve} and {training}",
                "",
                *next_steps(config, self._preset.script),
            ],
        )


def _tell_failure(task: asyncio.Task[None], view: LiveView) -> None:
    """Report that the view failed. The run continues without it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        view.notice(f"the progress shown is no longer updated: {error!r}")
