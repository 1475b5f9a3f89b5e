"""From task files to the ledger: training tasks block by block, held-out tasks on request.

Rank 0 of the trainer calls it. Training tasks are stored in their group order, one block whenever
few unclaimed ones are left. So the start takes the same time with a million lines as with ten.
Feeding continues after the newest group in the ledger. Ids are derived from split, epoch and line,
so a repetition after a crash changes nothing.
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

BLOCK = 256  # groups stored at once: about 50 ms of work


def make_tasks(
    lines: Sequence[TaskLine],
    split: Split,
    epoch: int,
    rollouts: int,
    order: Sequence[int],
    data: int = 0,
    first: int = 0,
) -> list[Task]:
    """Tasks for the lines whose indices are in `order`, at places from `first` on in the epoch.

    `rollouts`: slots per Task. `data`: number of the data set.
    """
    now = datetime.now(UTC)
    # Training epochs never repeat. A step may be evaluated again with other data.
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
            system_prompt=line.system_prompt,
            messages=line.messages,
            fields=line.fields,
            pending=rollouts,
            slots=[Slot(rollout=rollout) for rollout in range(rollouts)],
            created_at=now,
        )
        for seq, line in enumerate((lines[index] for index in order), start=first)
    ]


def of_data(data: int) -> dict[str, object]:
    """The filter for tasks of a data set. In older databases, tasks of the first have no number."""
    return {"data": data if data else {"$in": [0, None]}}


class TaskFeeder:
    """Keeps enough open training tasks in the ledger, and adds evaluations.

    `train`: lines are read as they are needed. `epochs`: passes over the training lines; None for
    no limit. `low_water`: minimum number of unclaimed training groups in the ledger.
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
        self._next_epoch, self._next_seq = 0, 0  # the next group to store
        self._order: tuple[int, array[int]] = (-1, array("l"))  # epoch, and its order of lines
        self._first_epoch = 0
        self._data = 0

    @property
    def has_tasks(self) -> bool:
        """Whether there is anything to sample."""
        return bool(self._train)

    @property
    def epochs(self) -> int:
        """Epochs of this data set that were added completely."""
        return self._next_epoch - self._first_epoch

    async def next_epoch(self) -> int:
        """The first epoch without a training task in the ledger."""
        newest = await self._newest_group()
        return 0 if newest is None else newest // GROUPS_PER_EPOCH + 1

    async def leave(self, data: int) -> int:
        """Leave out unclaimed tasks of the data sets before `data`; returns how many."""
        return await self._ledger.leave_out(data)

    async def start(self, data: int = 0, first_epoch: int = 0, seed: int | None = None) -> None:
        """Continue after the newest training group in the ledger, and top up.

        `data`: number of the data set, which begins at `first_epoch`. `seed`: seed of the order of
        its lines; a change in the middle of an epoch would skip lines.
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
        """Add tasks until there are `low_water` unclaimed groups or all tasks are added."""
        if not self._train:
            return
        unclaimed = await self._database.tasks.count_documents(
            {"status": TaskStatus.CREATED, "split": Split.TRAIN},
            limit=self._low_water,
            hint="state",
        )
        while unclaimed < self._low_water and not self.all_added:
            unclaimed += await self._add_block()

    async def _add_block(self) -> int:
        """Store the next block of groups of an epoch; returns how many are new."""
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
        """Continue at place `seq` of the epoch, or in the next epoch if this one is complete."""
        self._next_seq = seq
        if seq >= len(self._train):
            self._next_epoch, self._next_seq = self._next_epoch + 1, 0

    async def _newest_group(self) -> int | None:
        """The group order of the newest training group; None if there is none.

        Read from a majority of the members: a group that only a failing primary has can be undone,
        and would never be fed again.
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
        """Whether all epochs are sampled and finalised, so that no further rows can come."""
        if not self.all_added:
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
        """Whether every group of the evaluation at `step` is finalised."""
        places = epoch_places(step)
        of_step = {"split": Split.EVAL, "group_order": places, **of_data(self._data)}
        return await self._open_task(of_step) is None

    async def _open_task(self, selection: dict[str, object]) -> dict[str, object] | None:
        """A task of `selection` that has not ended, or None.

        Read from a majority of the members, because the caller acts on None once.
        """
        durable = self._database.durable(self._database.tasks)
        return await durable.find_one(
            {"status": {"$in": OPEN_TASKS}, **selection}, {"_id": 1}, hint="state"
        )

    @property
    def all_added(self) -> bool:
        """Whether the tasks of all epochs are in the ledger."""
        if self._epochs is None:
            return False
        return self._next_epoch >= self._first_epoch + self._epochs
