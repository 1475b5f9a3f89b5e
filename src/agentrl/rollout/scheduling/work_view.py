"""The work that may be begun now, read from the database. `scheduler.py` acts on it."""

from dataclasses import dataclass

from agentrl.databases import runs, services
from agentrl.databases.changes import Changes, inserted, updated
from agentrl.databases.connection import RunDatabase, retry_through_outages
from agentrl.databases.documents import Run, Split, TaskStatus, epoch_places
from agentrl.databases.row_ledger import count_waiting
from agentrl.databases.tasks import UNBOUNDED, open_groups
from agentrl.databases.transitions import OPEN_TASKS
from agentrl.rollout.scheduling.admission import admission_limit, admitted_groups, room


@dataclass(frozen=True)
class WorkView:
    """The result of one look.

    `services`: URLs of services with the newest weights. `evaluation`: whether evaluation slots are
    free. `training`: the run, if training groups may be sampled. `finished`: whether no work is
    left. `hopeless`: why the trainer gave the run up; None if it did not.
    """

    services: tuple[str, ...] = ()
    evaluation: bool = False
    training: Run | None = None
    finished: bool = False
    hopeless: str | None = None


@dataclass(frozen=True)
class Observer:
    """Reads a run's database for one sampler.

    `evaluation`: sample only this evaluation; None: the run. `sampling`: whether to sample training
    groups. `steps_ahead`: by which samplers may run ahead of the trainer. `group_size`: rollouts of
    a group. `endpoint`: URL of an API that is asked instead of services.
    """

    database: RunDatabase
    evaluation: int | None
    sampling: bool
    steps_ahead: int
    group_size: int
    endpoint: str | None = None

    def changes(self) -> Changes:
        """The changes after which to look again: steps, publications, new tasks."""
        return Changes(
            self.database,
            updated(self.database.runs, "step"),
            updated(self.database.runs, "status"),
            updated(self.database.services, "weight_version"),
            inserted(self.database.tasks),
        )

    async def look(self) -> WorkView:
        """Read the run's document, the services and the tasks."""
        return await retry_through_outages(self._look, "the look for work")

    async def admission_limit(self, run: Run) -> int | None:
        """The group order up to which training groups may be begun; None if none may.

        With fixed weights no group grows stale.
        """
        if run.status == runs.SAMPLING:
            return UNBOUNDED
        return await retry_through_outages(
            lambda: self._admission_limit(run), "the staleness bound"
        )

    async def _look(self) -> WorkView:
        if self.evaluation is not None:
            if await self._evaluated(self.evaluation):
                return WorkView(finished=True)
            return WorkView(await self._services(), await self._evaluation_waits())
        run = await runs.load_run(self.database)
        if run is None:
            return WorkView()
        if run.status == runs.FINISHED:
            return WorkView(finished=True)
        if run.status == runs.HOPELESS:
            return WorkView(hopeless=run.failure)
        training = run.status in (runs.TRAINING, runs.SAMPLING) and self.sampling
        return WorkView(
            await self._services(), await self._evaluation_waits(), run if training else None
        )

    async def _services(self) -> tuple[str, ...]:
        if self.endpoint is not None:
            return (self.endpoint,)
        serving = await services.serving(self.database)
        return tuple(service.url for service in serving)

    async def _evaluation_waits(self) -> bool:
        free_slot = {"split": Split.EVAL, "pending": {"$gt": 0}}
        return await self.database.tasks.find_one(free_slot, {"_id": 1}) is not None

    async def _evaluated(self, epoch: int) -> bool:
        unfinished = {
            "split": Split.EVAL, "group_order": epoch_places(epoch), "status": {"$in": OPEN_TASKS},
        }  # fmt: skip
        return await self.database.tasks.find_one(unfinished, {"_id": 1}, hint="state") is None

    async def _admission_limit(self, run: Run) -> int | None:
        # The order of these reads matters: see `admission.py`.
        empty = room(
            max_staleness=self.steps_ahead, version=0, batch=run.rows_per_step,
            accepted=0, running=0,
        )  # fmt: skip
        not_begun = await self._not_begun(admitted_groups(empty, self.group_size))
        running = await open_groups(self.database, Split.TRAIN) * self.group_size
        accepted = await count_waiting(self.database, max(1, empty))
        free = room(
            max_staleness=self.steps_ahead, version=0, batch=run.rows_per_step,
            accepted=accepted, running=running,
        )  # fmt: skip
        return admission_limit(not_begun, free, self.group_size)

    async def _not_begun(self, count: int) -> list[int]:
        """Group orders of the first `count` unclaimed groups; a covered query."""
        created = {"status": TaskStatus.CREATED, "split": Split.TRAIN}
        cursor = self.database.tasks.find(created, {"_id": 0, "group_order": 1})
        first = cursor.sort([("status", 1), ("split", 1), ("group_order", 1)]).limit(count)
        return [document["group_order"] async for document in first]
