"""From task files to the ledger: training tasks epoch by epoch, held-out tasks when asked.

The trainer's rank 0 calls it. Ids are derived from split, epoch and line, so that doing it again
after a crash changes nothing.
"""

import random
from collections.abc import Sequence
from datetime import UTC, datetime

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Slot, Split, Task, TaskStatus, group_order
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger, task_key


def make_tasks(
    lines: Sequence[TaskLine],
    split: Split,
    epoch: int,
    rollouts: int,
    order: Sequence[int],
    data: int = 0,
) -> list[Task]:
    """The Tasks of one epoch of data set `data`: line `order[seq]` comes at place `seq`."""
    now = datetime.now(UTC)
    # Epochs of training follow each other; an evaluation of a step may come again with other data.
    again = f"d{data}-" if data and split == Split.EVAL else ""
    return [
        Task(
            id=task_key(split, epoch, again + lines[index].id),
            data=data,
            split=split,
            epoch=epoch,
            seq=seq,
            group_order=group_order(epoch, seq),
            task_id=lines[index].id,
            query=lines[index].query,
            answer=lines[index].answer,
            scorer=lines[index].scorer,
            answer_schema=lines[index].answer_schema,
            agent_name=lines[index].agent_name,
            messages=lines[index].messages,
            fields=lines[index].fields,
            pending=rollouts,
            slots=[Slot(rollout=rollout) for rollout in range(rollouts)],
            created_at=now,
        )
        for seq, index in enumerate(order)
    ]


def of_data(data: int) -> dict[str, object]:
    """The filter of the tasks of a data set. Older databases know of the first one only."""
    return {"data": data if data else {"$in": [0, None]}}


class TaskFeeder:
    """Keeps enough open training tasks in the ledger, and adds evaluations.

    `epochs`: passes over the training lines, or None for as many as the steps need.
    `low_water`: how many training groups nobody has claimed yet must be there.
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
        self._next_epoch = 0
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
        newest = await self._newest_epoch()
        return 0 if newest is None else newest + 1

    async def leave(self, data: int) -> int:
        """Leave out what nobody has begun of the data sets before `data`; returns how many."""
        return await self._ledger.leave_out(data)

    async def start(self, data: int = 0, first_epoch: int = 0) -> None:
        """Find out which epochs the ledger already holds, complete the newest, and top up.

        `data`: the number of the data set that the lines are, which begins at `first_epoch`.
        """
        self._data, self._first_epoch = data, first_epoch
        self._next_epoch = first_epoch
        newest = await self._newest_epoch()
        if newest is not None and newest >= first_epoch:
            # A crash may have left it half stored; what is there stays as it is.
            await self._add_epoch(newest)
            self._next_epoch = newest + 1
        await self.top_up()

    async def top_up(self) -> None:
        """Add epochs until `low_water` unclaimed groups are there, or all epochs are."""
        if not self._train:
            return
        unclaimed = await self._database.tasks.count_documents(
            {"status": TaskStatus.CREATED, "split": Split.TRAIN}
        )
        while unclaimed < self._low_water and not self._all_added():
            unclaimed += await self._add_epoch(self._next_epoch)
            self._next_epoch += 1

    async def _add_epoch(self, epoch: int) -> int:
        order = list(range(len(self._train)))
        random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return await self._ledger.add(
            make_tasks(self._train, Split.TRAIN, epoch, self._num_generations, order, self._data)
        )

    async def _newest_epoch(self) -> int | None:
        newest = await self._database.tasks.find_one(
            {"split": Split.TRAIN}, {"epoch": 1}, sort=[("epoch", -1)]
        )
        return None if newest is None else int(newest["epoch"])

    async def exhausted(self) -> bool:
        """Whether all epochs are sampled and finalised: no further row can come."""
        if not self._all_added():
            return False
        open_task = await self._database.tasks.find_one(
            {
                "split": Split.TRAIN,
                "status": {"$nin": [TaskStatus.COMPLETED, TaskStatus.LEFT_OUT]},
            },
            {"_id": 1},
        )
        return open_task is None

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
        open_task = await self._database.tasks.find_one(
            {
                "split": Split.EVAL, "epoch": step, "status": {"$ne": TaskStatus.COMPLETED},
                **of_data(self._data),
            },
            {"_id": 1},
        )  # fmt: skip
        return open_task is None

    def _all_added(self) -> bool:
        if self._epochs is None:
            return False
        return self._next_epoch >= self._first_epoch + self._epochs
