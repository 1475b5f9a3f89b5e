"""Feeds a run without a trainer: its weights stay as they are, and it ends with its tasks.

The feeder has the trainer's place in the run: it holds the run's lease, publishes the start weights
as the first policy version, adds tasks, keeps the services at these weights, and marks the run as
finished once all groups are. Samplers notice no difference, but that no group is too early.
"""

import asyncio
import math
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pymongo.errors import PyMongoError

from agentrl.configs import Config, ConfigError
from agentrl.databases import policies, runs
from agentrl.databases.changes import Changes, updated
from agentrl.databases.connection import RunDatabase, retry_through_outages
from agentrl.databases.documents import DataSet
from agentrl.databases.feeder import BLOCK, TaskFeeder
from agentrl.databases.hopeless import HopelessWatch
from agentrl.databases.owners import process_name
from agentrl.databases.runs import RunHopeless, RunLease
from agentrl.databases.services import register_urls
from agentrl.databases.task_file import open_tasks
from agentrl.databases.transitions import ENDED_TASKS
from agentrl.launcher.fixed_weights import load_weights
from agentrl.training.run.entry import TASKS, RunEntry
from agentrl.training.run.feeding import begin_feeding

FIXED_VERSION = 0  # the policy version of the weights
_LONGEST_WAIT_S = 1.0
_RELEASE_S = 5.0


async def feed(database: RunDatabase, config: Config, entry: RunEntry) -> None:
    """Feed the run until all its tasks are done, then mark it as finished.

    Raises `ConfigError` if a trainer has trained the run, `TrainerAlive`, `TrainerReplaced`, and
    `RunHopeless` if its attempts fail.
    """
    assert config.data.train_file and config.model.model_name_or_path, "checked before"
    model = Path(config.model.model_name_or_path).absolute()
    await refuse_trained(database)
    sampling = config.sampling
    lease = RunLease(database, process_name(), socket.gethostname(), sampling.lease_seconds)
    run = await retry_through_outages(lambda: lease.acquire(0), "the run's lease")
    keeping = asyncio.create_task(_keep(lease, sampling.lease_seconds / 3))
    feeding = asyncio.create_task(_feed(database, config, entry, model, lease, run.data))
    try:
        await asyncio.wait({keeping, feeding}, return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            await keeping
        await feeding
    finally:
        for task in (keeping, feeding):
            task.cancel()
        await asyncio.gather(keeping, feeding, return_exceptions=True)
        with suppress(PyMongoError, TimeoutError):  # it expires by itself
            async with asyncio.timeout(_RELEASE_S):
                await lease.release()


async def refuse_trained(database: RunDatabase) -> None:
    """Raise `ConfigError` if a trainer has published weights of the run."""
    newest = await policies.latest(database)
    if newest is not None and newest.version != FIXED_VERSION:
        raise ConfigError(
            f"run {database.name!r} has been trained, and its start weights are no longer sampled: "
            f"give --run_name another name (--model {database.name} samples its last checkpoint)"
        )


async def _feed(
    database: RunDatabase,
    config: Config,
    entry: RunEntry,
    model: Path,
    lease: RunLease,
    known: Sequence[DataSet],
) -> None:
    lines = open_tasks(Path(config.data.train_file or ""), config.output / TASKS)
    epochs = math.ceil(config.data.num_train_epochs)
    feeder = TaskFeeder(
        database,
        lines,
        [],
        num_generations=config.sampling.num_generations,
        eval_rollouts=1,
        epochs=epochs,
        low_water=BLOCK,
        seed=config.run.seed,
    )

    async def begin() -> None:
        await register_urls(database, config.inference_urls)
        if await policies.latest(database) is None:
            await policies.publish(database, FIXED_VERSION, 0, str(model))
        await policies.serve(database, FIXED_VERSION)
        await begin_feeding(feeder, lease, entry, known, 0)
        await lease.sample(version=FIXED_VERSION, n_groups=epochs * len(lines))

    async def go_on() -> bool:
        await feeder.top_up()
        await load_weights(database, config, FIXED_VERSION, model)
        return await feeder.exhausted()

    await retry_through_outages(begin, "the start of the run")
    watch = HopelessWatch(database, config.sampling.max_failures_without_success)
    async with Changes(database, updated(database.tasks, "status", *ENDED_TASKS)) as changes:
        while not await retry_through_outages(go_on, "the feeding of tasks"):
            # Groups without a row are no failure: nothing is trained yet.
            reason = await watch.look(training=False)
            if reason is not None:
                await lease.give_up(reason)
                raise RunHopeless(reason)
            await changes.wait(_LONGEST_WAIT_S)
    await retry_through_outages(
        lambda: lease.progress(step=0, max_steps=0, version=FIXED_VERSION, status=runs.FINISHED),
        "the end of the run",
    )


async def _keep(lease: RunLease, every_s: float) -> None:
    """Extend the lease. Raises `TrainerReplaced`."""
    while True:
        await asyncio.sleep(every_s)
        await retry_through_outages(lease.heartbeat, "the run's lease")
