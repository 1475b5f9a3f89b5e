"""From task files to the ledger: training tasks block by block, held-out tasks on request.

Rank 0 of the trainer calls it. Training tasks are stored in their group order, a block when few
are left that nobody has begun. So a run begins as soon with a million lines as with ten, and the
ledger itself says where feeding goes on: behind the newest group. Ids are derived from split, epoch
and line, so a repetition after a crash changes nothing.
"""

import random
from array import array
from collections.abc import Sequence
from datetime import UTC, datetime

from agentrl.databases.connection import RunDatabase, retry_through_outages
from agentrl.databases.documents import (
    GROUPS_PER_EPOCH,
    Slot,
    Split,
    Task,
    TaskStatus,
    epoch_places,
    group_order,
)
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger, task_key
from agentrl.databases.transitions import OPEN_TASKS

BLOCK = 256  # groups that are stored at once: some 50 ms of work


def make_tasks(
    lines: Sequence[TaskLine],
    split: Split,
    epoch: int,
    rollouts: int,
    order: Sequence[int],
    data: int = 0,
    first: int = 0,
) -> list[Task]:
    """The Tasks of an epoch of data set `data`: the lines of `order`, from place `first` on."""
    now = datetime.now(UTC)
    # Epochs of training follow each other; an evaluation of a step may come again with other data.
    again = f"d{data}-" if data and split == Split.EVAL else ""
    return [
        Task(
            id=task_key(split, epoch, again + line.id),
            data=data,
            split=split,
            epoch=epoch,
            seq=seq,
            group_order=group_order(epoch, seq),
            task_id=line.id,
            query=line.query,
            answer=line.answer,
            scorer=line.scorer,
            answer_schema=line.answer_schema,
            agent_name=line.agent_name,
            messages=line.messages,
            fields=line.fields,
            pending=rollouts,
            slots=[Slot(rollout=rollout) for rollout in range(rollouts)],
            created_at=now,
        )
        for seq, line in enumerate((lines[index] for index in order), start=first)
    ]


def of_data(data: int) -> dict[str, object]:
    """The filter of the tasks of a data set. Older databases know of the first one only."""
    return {"data": data if data else {"$in": [0, None]}}


class TaskFeeder:
    """Keeps enough open training tasks in the ledger, and adds evaluations.

    `train`: read line by line, as they are needed. `epochs`: passes over the training lines, or
    None for as many as the steps need. `low_water`: how many training groups nobody has claimed
    yet must be there.
    """

    def __init__(
        self,
        database: RunDatabase,
        train: Sequence[TaskLine],
        held_out: Sequence[TaskLine],
        *,
        num_generations: int,
        eval_rollouts: int,
        epochs: int | None,
        low_water: int,
        seed: int,
    ) -> None:
        self._database = database
        self._ledger = TaskLedger(database, owner="feeder", lease_seconds=60, max_failures=1)
        self._train = train
        self._held_out = held_out
        self._num_generations = num_generations
        self._eval_rollouts = eval_rollouts
        self._epochs = epochs
        self._low_water = low_water
        self._seed = seed
        self._next_epoch, self._next_seq = 0, 0  # the group that is stored next
        self._order: tuple[int, array[int]] = (-1, array("l"))  # of the lines, in an epoch
        self._first_epoch = 0
        self._data = 0

    @property
    def has_tasks(self) -> bool:
        """Whether there is anything to sample."""
        return bool(self._train)

    @property
    def epochs(self) -> int:
        """How many of this data set were added so far."""
        return self._next_epoch - self._first_epoch

    async def next_epoch(self) -> int:
        """The first epoch of which the ledger holds no training task."""
        newest = await self._newest_group()
        return 0 if newest is None else newest // GROUPS_PER_EPOCH + 1

    async def leave(self, data: int) -> int:
        """Leave out what nobody has begun of the data sets before `data`; returns how many."""
        return await self._ledger.leave_out(data)

    async def start(self, data: int = 0, first_epoch: int = 0, seed: int | None = None) -> None:
        """Find out how far the ledger is fed, and top up.

        `data`: the number of the data set that the lines are, which begins at `first_epoch`.
        `seed`: of the order of its lines; another one in the middle of an epoch would leave lines
        out.
        """
        self._data, self._first_epoch = data, first_epoch
        self._seed = self._seed if seed is None else seed
        self._next_epoch, self._next_seq = first_epoch, 0
        newest = await self._newest_group()
        if newest is not None and newest >= group_order(first_epoch, 0):
            self._next_epoch, place = divmod(newest, GROUPS_PER_EPOCH)
            self._go_to(place + 1)
        await self.top_up()

    async def top_up(self) -> None:
        """Add tasks until `low_water` unclaimed groups are there, or all are."""
        if not self._train:
            return
        unclaimed = await self._database.tasks.count_documents(
            {"status": TaskStatus.CREATED, "split": Split.TRAIN},
            limit=self._low_water,
            hint="state",
        )
        while unclaimed < self._low_water and not self._all_added():
            unclaimed += await self._add_block()

    async def _add_block(self) -> int:
        """Store the next groups of an epoch; returns how many are new."""
        epoch, first = self._next_epoch, self._next_seq
        if self._order[0] != epoch:
            order = array("l", range(len(self._train)))
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        block = self._order[1][first : first + BLOCK]
        tasks = make_tasks(
            self._train, Split.TRAIN, epoch, self._num_generations, block, self._data, first
        )
        added = await self._ledger.add(tasks)
        self._go_to(first + len(block))
        return added

    def _go_to(self, seq: int) -> None:
        """Go on at place `seq` of the epoch, or with the next one if it has no such place."""
        self._next_seq = seq
        if seq >= len(self._train):
            self._next_epoch, self._next_seq = self._next_epoch + 1, 0

    async def _newest_group(self) -> int | None:
        """The group order of the training group that was stored last.

        By a majority of the members: what a failing primary alone has seen may be undone, and
        groups before it would be missing for good.
        """
        durable = self._database.durable(self._database.tasks)
        newest = await retry_through_outages(
            lambda: durable.find_one(
                {"split": Split.TRAIN}, {"group_order": 1}, sort=[("group_order", -1)], hint="order"
            ),
            "the newest task",
        )
        return None if newest is None else int(newest["group_order"])

    async def exhausted(self) -> bool:
        """Whether all epochs are sampled and finalised: no further row can come."""
        if not self._all_added():
            return False
        return await self._open_task({"split": Split.TRAIN}) is None

    async def add_evaluation(self, step: int) -> None:
        """Add all held-out tasks, as split `eval` and epoch `step`."""
        await self._ledger.add(
            make_tasks(
                self._held_out,
                Split.EVAL,
                step,
                self._eval_rollouts,
                range(len(self._held_out)),
                self._data,
            )
        )

    async def evaluation_done(self, step: int) -> bool:
        """Whether every group of that evaluation is finalised."""
        places = epoch_places(step)
        of_step = {"split": Split.EVAL, "group_order": places, **of_data(self._data)}
        return await self._open_task(of_step) is None

    async def _open_task(self, selection: dict[str, object]) -> dict[str, object] | None:
        """A task of `selection` that is not over, as a majority of the members knows it: what
        follows from there being none is not asked again."""
        durable = self._database.durable(self._database.tasks)
        return await durable.find_one(
            {"status": {"$in": OPEN_TASKS}, **selection}, {"_id": 1}, hint="state"
        )

    def _all_added(self) -> bool:
        if self._epochs is None:
            return False
        return self._next_epoch >= self._first_epoch + self._epochs
