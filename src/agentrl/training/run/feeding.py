"""Begins to feed a run with the tasks of its present data, for the process that holds its lease."""

import logging
from collections.abc import Sequence

from agentrl.databases.documents import DataSet
from agentrl.databases.feeder import TaskFeeder
from agentrl.databases.runs import RunLease
from agentrl.training.run.entry import RunEntry

logger = logging.getLogger(__name__)


async def begin_feeding(
    feeder: TaskFeeder, lease: RunLease, entry: RunEntry, known: Sequence[DataSet], step: int
) -> list[DataSet]:
    """Start the feeder on the run's present data. Unbegun tasks of earlier data are left out.

    `known`: the run's data sets so far. `step`: the optimizer step that it begins after. Returns
    all data sets, the present one last.
    """
    data = list(known)
    if entry.begins:
        epoch = await feeder.next_epoch() if known else 0
        begun = entry.data.model_copy(update={"epoch": epoch, "step": step})
        data = await lease.begin_data(begun)
    number, present = len(data) - 1, data[-1]
    left = await feeder.leave(number)
    if left:
        logger.info("%d tasks of other data, which nobody had begun, are left out", left)
    await feeder.start(number, present.epoch, present.seed)
    return data
