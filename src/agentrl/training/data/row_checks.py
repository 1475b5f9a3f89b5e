"""Checks a row before it is put into a micro-batch.

Rows are also checked before they are stored (`rollout/groups/boundary.py`). A row that fails here
was damaged since, or is of another model. It must not reach a device, because a token outside the
vocabulary crashes a process on a GPU.
"""

import math

import numpy as np

from agentrl.databases.documents import DBRecordData


def check_trainable(row: DBRecordData, vocab_size: int) -> None:
    """Raise ValueError if a step cannot train the row. `vocab_size`: of the policy's embedding."""
    ids = row.tree["ids"]
    beyond = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(beyond):
        raise ValueError(
            f"token {beyond[0]} has the id {ids[beyond[0]]}, and the model {vocab_size} tokens"
        )
    for name, values in row.tree.columns.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            place = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(f"`{name}` of token {place} is {values[place]}")
    if not (row.temperature > 0 and math.isfinite(row.reward)):
        raise ValueError(f"its temperature is {row.temperature}, its reward {row.reward}")
    if not row.tree["mask"][1:].any():
        raise ValueError("it has no token to train")
