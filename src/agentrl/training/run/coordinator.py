"""Rank 0's work for the run: lease, tasks, publication of weights, and progress.

The methods are coroutines for the background loop of rank 0. Other ranks get `HeldRun`.
"""

import asyncio
import logging
import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agentrl.configs import Config, ConfigError
from agentrl.databases.changes import Changes, updated
from agentrl.databases.connection import RunDatabase, retry_through_outages
from agentrl.databases.device_use import TRAINER, Devices, note_use
from agentrl.databases.documents import DataSet, TrainerStart, group_order
from agentrl.databases.feeder import TaskFeeder
from agentrl.databases.hopeless import HopelessWatch
from agentrl.databases.outages import Outage, current
from agentrl.databases.row_ledger import RowCounts, RowHeader, RowLedger, count_rows
from agentrl.databases.runs import RunLease, TrainerReplaced, load_run
from agentrl.databases.services import SILENT_S, register_urls
from agentrl.databases.step_metrics import keep_metrics
from agentrl.databases.success import Evaluations, HeldOut
from agentrl.databases.task_file import (
    TaskCheck,
    TaskLine,
    checked_by,
    go_on,
    keep_check,
    known_check,
    open_tasks,
    read_tasks,
)
from agentrl.databases.trained_logprobs import KeptColumns
from agentrl.databases.transitions import ENDED_TASKS
from agentrl.inference.weights.ways import make_updater
from agentrl.training.background import BackgroundLoop
from agentrl.training.data.stream import LedgerSource
from agentrl.training.run.entry import TASKS, RunEntry, enter, settle
from agentrl.training.run.feeding import begin_feeding
from agentrl.training.run.gpu_sharing import GpuSharing
from agentrl.training.run.publication import Publication, Publisher, next_version
from agentrl.training.run.rollout_table import Rollout, read_rollouts
from agentrl.training.run.startup import checkpoint_to_resume

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 1.0  # longest time between two checks, also of `stop`
_FIRST_CHECK_S = 1.0  # time for a task file before the run is taken
_BY = checked_by()  # a check of rows only; the trainer does not know scorers and agents


@dataclass(frozen=True)
class HeldRun:
    """The state of the run when rank 0 has taken it, the same on all processes."""

    fence: int  # fencing number of this trainer
    total_steps: int  # number of steps of the run
    checkpoint: Path | None  # the checkpoint to resume from


class RunCoordinator:
    """Rank 0's operations on the run's database and inference services."""

    def __init__(
        self, database: RunDatabase, config: Config, output: Path, trainer: str, rows_per_step: int
    ) -> None:
        """Open the task files. Raises `ConfigError` or `TaskFileError`.

        `output`: the run's folder. `trainer`: id of this trainer. `rows_per_step`: over all ranks.
        """
        self._database = database
        self._config = config
        self._check: TaskCheck | None = None
        train: Sequence[TaskLine] = []
        if config.sampling.enable_sampling:
            if not config.data.train_file:
                raise ConfigError(
                    "--train_file is needed: the tasks to sample (or --enable_sampling false)"
                )
            file = Path(config.data.train_file)
            train = open_tasks(file, output / TASKS)
            self._check = self._begin_check(file, output / TASKS)
        held_out = config.data.eval_file if config.data.eval_steps != 0 else None
        self._held_out = read_tasks(Path(held_out)) if held_out else []
        self._n_train = len(train)
        self._epochs = math.ceil(config.data.num_train_epochs)
        group = config.sampling.num_generations
        ahead = (config.staleness_bound + 2) * rows_per_step
        endless = config.optimizer.max_steps >= 0 and train
        self._feeder = TaskFeeder(
            database,
            train,
            self._held_out,
            num_generations=group,
            eval_rollouts=config.data.eval_rollouts,
            epochs=None if endless else self._epochs if train else 0,
            low_water=-(-ahead // group),
            seed=config.run.seed,
        )
        self._trainer = trainer
        self._lease = RunLease(
            database, trainer, socket.gethostname(), config.sampling.lease_seconds
        )
        on_gpu = torch.cuda.is_available() and not config.parallel.use_cpu
        device = torch.device(f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu")
        processes = dist.get_world_size()
        self._devices = Devices(
            TRAINER,
            gpus=processes if on_gpu else 0,
            cores=0 if on_gpu else processes * torch.get_num_threads(),
        )
        self._publisher = Publisher(
            database,
            output,
            SILENT_S,
            make_updater(config.services.weight_update, device),
            "in_place" if config.services.weight_update_pause == "in_place" else "retract",
            hold=self._lease.heartbeat,
            api_key=config.sampling.inference_api_key,
        )
        self._sharing = GpuSharing(database, SILENT_S, config.sampling.inference_api_key)
        self._watch = HopelessWatch(database, config.sampling.max_failures_without_success)
        self._evaluations = Evaluations(database)
        self._told: set[int] = set()  # steps of the evaluations that `evaluated` returned
        self._first_step = 0
        self._rows_per_step = rows_per_step
        self._total_steps = 0
        self._output = output
        self._ledger: RowLedger | None = None
        self._starts: list[TrainerStart] = []
        self._entry: RunEntry | None = None
        self._known_data: list[DataSet] = []

    @property
    def ledger(self) -> RowLedger:
        """The ledger of rows. Requires `acquire`."""
        assert self._ledger is not None, "the run was not acquired"
        return self._ledger

    @property
    def starts(self) -> Sequence[TrainerStart]:
        """Where the run's earlier trainers began."""
        return self._starts

    async def acquire(self) -> HeldRun:
        """Take the run's lease and choose the checkpoint to resume from.

        Raises `TrainerAlive` if another trainer has the run, and `CheckpointError` or `ConfigError`
        if the checkpoint of `--resume_from_checkpoint` cannot be used.
        """
        run = await retry_through_outages(
            lambda: self._lease.acquire(self._rows_per_step), "the run's lease"
        )
        self._starts = run.starts
        self._known_data = run.data
        optimizer = self._config.optimizer
        self._ledger = RowLedger(
            self._database,
            self._trainer,
            run.fence,
            optimizer.max_trained_count,
            optimizer.retrained_interval,
        )
        checkpoint = checkpoint_to_resume(self._config, run.starts)
        self._total_steps = await self._count_steps()
        return HeldRun(run.fence, self._total_steps, checkpoint)

    @property
    def begins_data(self) -> bool:
        """Whether this start begins with new data or again from the start weights.

        Requires `enter`.
        """
        assert self._entry is not None, "the run was not entered"
        return self._entry.begins

    async def enter(self) -> None:
        """Check that folder and database are of one run with this data, and store the start.

        Raises `ConfigError`.
        """
        entry = await retry_through_outages(
            lambda: enter(self._database, self._config), "the run's document"
        )
        await retry_through_outages(
            lambda: settle(self._database, self._config, entry), "the run's flags"
        )
        self._entry = entry

    async def hold(self) -> None:
        """Extend the lease. Raises `TrainerReplaced` if another trainer has taken the run."""
        await retry_through_outages(self._lease.heartbeat, "the run's lease")

    async def start(self, step: int) -> int:
        """Reset the ledger to `step` and begin feeding. Returns the version to publish first."""
        self._first_step = step
        return await retry_through_outages(lambda: self._start(step), "the start of the run")

    async def _start(self, step: int) -> int:
        await self._lease.begin(step)
        again = await self.ledger.rewind(step)
        if again:
            logger.info("%d rows of steps after step %d are ready again", again, step)
        await register_urls(self._database, self._config.inference_urls)
        await self._start_feeding(step)
        return await next_version(self._database, SILENT_S)

    async def _start_feeding(self, step: int) -> None:
        """Begin to feed tasks of the present data. Tasks and rows of earlier data are left out."""
        assert self._entry is not None, "the run was not entered"
        self._known_data = await begin_feeding(
            self._feeder, self._lease, self._entry, self._known_data, step
        )
        self.ledger.begin_at(group_order(self._known_data[-1].epoch, 0))

    def run_beside(self, background: BackgroundLoop) -> None:
        """Keep the lease, update late services and check a large task file in the background."""
        background.watch(self._keep_lease())
        if self._check is not None:
            background.watch(self._check_on(self._check))
        sampling = self._config.sampling
        patience = sampling.startup_timeout if sampling.enable_sampling else math.inf
        background.watch(
            retry_through_outages(
                lambda: self._publisher.keep_current(patience), "the look for inference services"
            )
        )

    def source(self, stop: threading.Event) -> LedgerSource:
        """The source of the rows of steps. `stop`: ends its waits."""
        return LedgerSource(
            self._database,
            self.ledger,
            self._feeder,
            rows_per_step=self._rows_per_step,
            max_staleness=self._config.staleness_bound,
            stop=stop,
            watch=self._watch,
        )

    async def quarantine(self, step: int, faults: Mapping[str, str]) -> None:
        """Quarantine rows leased for `step` that cannot be trained. `faults`: reason by row id."""
        await retry_through_outages(
            lambda: self.ledger.quarantine(step, faults), f"the quarantine of rows of step {step}"
        )
        for row, error in faults.items():
            logger.error("row %s is quarantined: %s", row, error)

    async def commit(
        self, step: int, ids: Sequence[str], kept: Mapping[str, KeptColumns] | None = None
    ) -> None:
        """Mark rows as trained by `step`. Raises `TrainerReplaced` if another trainer has some.

        `kept`: what the trainer says of their tokens, by row.
        """
        await self.hold()
        committed = await retry_through_outages(
            lambda: self.ledger.commit(step, ids, kept), f"the commit of step {step}"
        )
        if committed != len(ids):
            raise TrainerReplaced(
                f"{committed} of the {len(ids)} rows of step {step} were still leased by this "
                "trainer: another one took them, this one stops"
            )

    async def counts(self, step: int) -> RowCounts:
        """The numbers of ready and evicted rows after `step` was committed."""
        return await retry_through_outages(lambda: self.ledger.counts(step), "the count of rows")

    async def outages(self) -> list[Outage]:
        """The present outages, which samplers wait for."""
        return await retry_through_outages(lambda: current(self._database), "the outages")

    async def rollouts(self, rows: Sequence[RowHeader], pages: str | None) -> list[Rollout]:
        """The best and the worst rollouts among a step's rows, for trackers."""
        return await retry_through_outages(
            lambda: read_rollouts(self._database, rows, pages), "the rollouts of the step"
        )

    async def evaluated(self) -> HeldOut | None:
        """The oldest finished evaluation of this trainer's steps that was not returned yet."""

        async def read() -> list[HeldOut]:
            await self._evaluations.read(await load_run(self._database))
            return self._evaluations.finished

        for done in await retry_through_outages(read, "the evaluations"):
            if done.step >= self._first_step and done.step not in self._told:
                self._told.add(done.step)
                return done
        return None

    async def release_gpus(self) -> int:
        """Release the GPU memory of the services until `publish`. Returns how many released it."""
        async with self._publisher.quiet():
            return await self._sharing.release()

    async def publish(self, publication: Publication, evaluate: bool) -> float:
        """Update the services to `publication`; `evaluate`: then begin its evaluation.

        Returns the longest pause of a service in seconds.
        """
        what = f"the publication of version {publication.version}"
        # Also services that a crashed trainer released, perhaps with another --inf_share_gpus.
        await retry_through_outages(self._sharing.resume, what)
        stall_seconds = await retry_through_outages(
            lambda: self._publisher.publish(publication), what
        )
        if evaluate and self._held_out:
            await retry_through_outages(lambda: self._feeder.add_evaluation(publication.step), what)
        return stall_seconds

    async def await_evaluation(self, step: int, stop: threading.Event) -> None:
        """Wait until the evaluation of `step`, if there is one, is done or `stop` is set.

        The wait for the evaluation of step 0 also ends if the run is hopeless. The first
        `LedgerSource.lease` then raises the reason.
        """
        if not self._held_out:
            return
        began = time.monotonic()
        group_done = updated(self._database.tasks, "status", *ENDED_TASKS)
        async with Changes(self._database, group_done) as changes:
            while not stop.is_set() and not await retry_through_outages(
                lambda: self._feeder.evaluation_done(step), f"the evaluation of step {step}"
            ):
                if step == 0 and await self._watch.look(training=False) is not None:
                    return
                await changes.wait(_LONGEST_WAIT_S)
        logger.info("evaluation of step %d took %.1f s", step, time.monotonic() - began)

    async def evaluate(self, step: int, stop: threading.Event) -> None:
        """Evaluate the services' present weights as those of `step`, and wait for the end."""
        if self._held_out:
            await retry_through_outages(
                lambda: self._feeder.add_evaluation(step), f"the evaluation of step {step}"
            )
            await self.await_evaluation(step, stop)

    async def report(self, step: int, version: int, status: str) -> None:
        """Store the run's progress. `status`: one of `databases.runs`."""
        await retry_through_outages(
            lambda: self._lease.progress(
                step=step, max_steps=self._total_steps, version=version, status=status
            ),
            f"the report of step {step}",
        )

    async def keep_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Store the figures of a step, for readers that have no access to the run's folder."""
        await retry_through_outages(
            lambda: keep_metrics(self._database, self._lease.fence, step, values),
            f"the figures of step {step}",
        )

    async def give_up(self, failure: str) -> None:
        """Store that the run is hopeless, with the reason."""
        await retry_through_outages(lambda: self._lease.give_up(failure), "the end of the run")

    async def give_back_rows(self) -> None:
        """Release the rows that were leased ahead and not trained."""
        await retry_through_outages(self.ledger.release, "the return of rows")

    async def close_publisher(self) -> None:
        """Wait until the last publication is on disk, and close the publisher."""
        await self._publisher.close()

    async def release(self) -> None:
        """Release the run's lease."""
        await self._lease.release()
        await note_use(self._database, self._trainer, self._devices)

    async def _count_steps(self) -> int:
        """The number of steps: `--max_steps`, or the most that all rows suffice for."""
        if self._config.optimizer.max_steps >= 0:
            return self._config.optimizer.max_steps
        rows = self._n_train * self._epochs * self._config.sampling.num_generations
        if not self._n_train:
            rows = sum((await count_rows(self._database)).values())
        return -(-rows * self._config.optimizer.max_trained_count // self._rows_per_step)

    async def _keep_lease(self) -> None:
        """Extend the lease after each third of its length. Raises `TrainerReplaced`.

        During an outage of the database no trainer can take the run. A trainer that was cut off
        from the database finds out here, or at its next commit, if it was replaced.
        """
        while True:
            await retry_through_outages(
                lambda: note_use(self._database, self._trainer, self._devices), "the use of devices"
            )
            await asyncio.sleep(self._config.sampling.lease_seconds / 3)
            await self.hold()

    def _begin_check(self, file: Path, folder: Path) -> TaskCheck | None:
        """Begin the check of a task file; None if it is complete, like that of a small file.

        Raises `TaskFileError` with the mistakes so far.
        """
        if known_check(file, folder) is not None:
            return None
        check = TaskCheck(file)
        complete = check.advance(_FIRST_CHECK_S)
        check.found.without_mistakes()
        if complete:
            keep_check(check.found, folder, _BY)
            return None
        logger.info("%s: the rest of it is checked while the run begins", file)
        return check

    async def _check_on(self, check: TaskCheck) -> None:
        """Check a large task file to its end. Raises `TaskFileError`."""
        found = await go_on(check)
        found.without_mistakes()
        keep_check(found, self._output / TASKS, _BY)
        logger.info("%s: all %d tasks are as they should be", check.path, found.n_tasks)
