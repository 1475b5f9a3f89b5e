"""The run's own document: which trainer holds it, and how far it is."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DataSet, Run, TrainerStart

TRAINING, EVALUATING, FINISHED = "training", "evaluating", "finished"
SAMPLING = "sampling"  # without a trainer: the weights stay as they are
HOPELESS = "hopeless"  # the trainer gave it up, see `failure`; it can be resumed


class TrainerAlive(RuntimeError):
    """Another trainer holds the run. The message is one sentence for the user."""


class RunHopeless(RuntimeError):
    """The run fails, or gives no training rows. The message is one sentence for the user."""


class TrainerReplaced(RuntimeError):
    """Our lease on the run expired and another trainer took it: this trainer must stop."""


async def load_run(database: RunDatabase) -> Run | None:
    """The run's document; None before the first trainer took it."""
    document = await database.runs.find_one({"_id": database.name})
    return Run.from_mongo(document) if document else None


async def reopen(database: RunDatabase) -> None:
    """Take the run from a dead trainer, so that the next one need not wait for its lease to expire.

    Only for a launcher that has just started the run's own MongoDB: no earlier process can live.
    """
    await database.runs.update_one(
        {"_id": database.name},
        {"$set": {"trainer": None, "lease_expires": None, "status": "created", "failure": None}},
    )


async def go_on(database: RunDatabase) -> None:
    """Take back that the run is finished. For a launch that trains it further, before samplers
    look: one that finds a finished run ends."""
    await database.runs.update_one(
        {"_id": database.name, "status": FINISHED}, {"$set": {"status": "created"}}
    )


async def describe(
    database: RunDatabase, identity: str, flags: Mapping[str, Any], digests: Mapping[str, str]
) -> None:
    """Store the run's identity, flags and digests, see `Run`. Idempotent."""
    description = {
        "identity": identity,
        "flags": {"$literal": dict(flags)},  # a value may begin with `$`
        "digests": {"$literal": dict(digests)},
    }
    absent = Run(id=database.name).model_dump(exclude={"id", *description})
    with suppress(DuplicateKeyError):
        await database.runs.update_one({"_id": database.name}, {"$setOnInsert": absent}, True)
    await database.runs.update_one({"_id": database.name}, [{"$set": description}])


def refuse_second_trainer(run: Run) -> None:
    """Raise `TrainerAlive` while a trainer holds the run."""
    if run.trainer is None or run.lease_expires is None:
        return
    left = (run.lease_expires - datetime.now(UTC)).total_seconds()
    if left > 0:
        raise _alive(run, left)


def _alive(run: Run, seconds_left: float | None) -> TrainerAlive:
    left = "-" if seconds_left is None else f"{max(0.0, seconds_left):.0f}"
    return TrainerAlive(
        f"run {run.id!r} has a live trainer ({run.trainer} on {run.trainer_host}): stop it "
        f"first, or wait {left} s until its lease ends if it is dead, or use another name"
    )


def in_lineage(step: int, fence: int, starts: Sequence[TrainerStart]) -> bool:
    """Whether a checkpoint of trainer `fence` at `step` belongs to the run's current lineage.

    It does not if a later trainer began at an earlier step and so repeats this one.
    """
    return all(start.step >= step for start in starts if start.fence > fence)


class RunLease:
    """One trainer's lease on a run, identified by a fencing number.

    Every method may be repeated if its answer was lost. All but `acquire` and `release` raise
    `TrainerReplaced` if another trainer has the run.
    """

    def __init__(
        self, database: RunDatabase, trainer: str, host: str, lease_seconds: float
    ) -> None:
        self._database = database
        self._trainer = trainer
        self._host = host
        self._lease_ms = int(lease_seconds * 1000)
        self._fence = 0

    @property
    def fence(self) -> int:
        """Our fencing number, higher than all earlier trainers'; 0 before `acquire`."""
        return self._fence

    async def acquire(self, rows_per_step: int) -> Run:
        """Take the run and return its document. `rows_per_step`: over all data-parallel ranks.

        Raises `TrainerAlive` while another trainer holds the run.
        """
        name = self._database.name
        ours = {"$eq": ["$trainer", {"$literal": self._trainer}]}  # an earlier answer was lost
        over = {"$lt": ["$lease_expires", "$$NOW"]}
        ended = {"$in": ["$status", [FINISHED, HOPELESS]]}
        free = {"$or": [{"$eq": ["$trainer", None]}, over, ours]}
        # Two trainers may create the document at once. Only one gets the lease below.
        with suppress(DuplicateKeyError):
            await self._database.runs.update_one(
                {"_id": name},
                {"$setOnInsert": Run(id=name).model_dump(exclude={"id"})},
                upsert=True,
            )
        document = await self._database.runs.find_one_and_update(
            {"_id": name, "$expr": free},
            [
                {
                    "$set": {
                        "trainer": {"$literal": self._trainer},
                        "trainer_host": {"$literal": self._host},
                        "lease_expires": self._lease_end(),
                        "heartbeat": "$$NOW",
                        "rows_per_step": rows_per_step,
                        "status": {"$cond": [ended, "created", "$status"]},
                        "failure": None,
                        "fence": {"$add": ["$fence", 1]},
                    }
                }
            ],
            return_document=ReturnDocument.AFTER,
        )
        if document is None:
            run = await load_run(self._database)
            assert run is not None
            ends = run.lease_expires
            raise _alive(run, (ends - datetime.now(UTC)).total_seconds() if ends else None)
        self._fence = document["fence"]
        return Run.from_mongo(document)

    async def heartbeat(self) -> None:
        """Extend the lease. Raises `TrainerReplaced`."""
        await self._update({"lease_expires": self._lease_end(), "heartbeat": "$$NOW"})

    async def begin(self, step: int) -> None:
        """Record that training begins after `step`, the checkpoint's. Raises `TrainerReplaced`."""
        start = {"fence": self._fence, "step": step}
        others = {"$filter": {"input": "$starts", "cond": {"$ne": ["$$this.fence", self._fence]}}}
        await self._update({"starts": {"$concatArrays": [others, [start]]}})

    async def begin_data(self, data: DataSet) -> list[DataSet]:
        """Append `data` to the run's data sets, unless this trainer has done so.

        Returns all data sets of the run, the current one last. Raises `TrainerReplaced`.
        """
        new = {"$literal": {**data.model_dump(), "fence": self._fence}}
        known = {"$ifNull": ["$data", []]}
        ours = {"$in": [self._fence, {"$map": {"input": known, "in": "$$this.fence"}}]}
        await self._update({"data": {"$cond": [ours, known, {"$concatArrays": [known, [new]]}]}})
        run = await load_run(self._database)
        assert run is not None, "it was updated just now"
        return run.data

    async def progress(self, *, step: int, max_steps: int, version: int, status: str) -> None:
        """Store the run's progress and extend the lease. Raises `TrainerReplaced`."""
        await self._update(
            {
                "step": step,
                "max_steps": max_steps,
                "version": version,
                "status": status,
                "failure": None,
                "lease_expires": self._lease_end(),
                "heartbeat": "$$NOW",
            }
        )

    async def sample(self, *, version: int, n_groups: int) -> None:
        """Record that the run samples `n_groups` groups with the weights of `version`, and trains
        nothing. Raises `TrainerReplaced`.
        """
        await self._update({"status": SAMPLING, "version": version, "n_groups": n_groups})

    async def give_up(self, failure: str) -> None:
        """Mark the run as hopeless, for samplers and the launcher. Raises `TrainerReplaced`."""
        await self._update({"status": HOPELESS, "failure": {"$literal": failure}})

    async def release(self) -> None:
        """Release the run if it is still ours, so that the next trainer need not wait."""
        await self._database.runs.update_one(
            self._ours(), {"$set": {"trainer": None, "lease_expires": None}}
        )

    async def _update(self, changes: dict[str, object]) -> None:
        result = await self._database.runs.update_one(self._ours(), [{"$set": changes}])
        if result.matched_count == 0:
            raise TrainerReplaced(
                f"another trainer has taken over run {self._database.name!r}: this one stops"
            )

    def _ours(self) -> dict[str, object]:
        return {"_id": self._database.name, "trainer": self._trainer, "fence": self._fence}

    def _lease_end(self) -> dict[str, object]:
        return {"$add": ["$$NOW", self._lease_ms]}
