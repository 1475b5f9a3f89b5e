"""A stored turn as the request that asks a service for it again."""

import json
import shlex
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.databases.arrays import unpack_ints
from agentrl.databases.documents import DispatchedSamplingTask


def curl_command(turns: Sequence[DispatchedSamplingTask], number: int) -> str | None:
    """The command that sends the prompt of turn `number` to the service that answered it.

    `turns`: all of its Record. None if there is no such turn, or it has no tokens: it is another
    model's.
    """
    by_number = {turn.turn: turn for turn in turns}
    turn = by_number.get(number)
    if turn is None or not turn.output_ids:
        return None
    body = {
        "input_ids": prompt_ids(turns, turn).tolist(),
        "sampling_params": turn.params or {},
        "return_logprob": True,
    }
    words = [
        "curl", f"{turn.service}/generate", "-H", "Content-Type: application/json",
        "-d", json.dumps(body, separators=(",", ":")),
    ]  # fmt: skip
    return shlex.join(words)


def prompt_ids(
    turns: Sequence[DispatchedSamplingTask], turn: DispatchedSamplingTask
) -> NDArray[np.int32]:
    """All tokens of the prompt of a turn. `turns`: those of its Record."""
    by_id = {each.id: each for each in turns}
    before: dict[str, DispatchedSamplingTask] = {}  # the turn that each continues, in its segment
    last: dict[int, DispatchedSamplingTask] = {}
    for each in turns:
        if each.segment in last:
            before[each.id] = last[each.segment]
        last[each.segment] = each
    pieces: list[NDArray[np.int32]] = []
    left: int | None = None  # tokens of the turn's prompt and output that are wanted; None: prompt
    at: DispatchedSamplingTask | None = turn
    while at is not None:
        own = unpack_ints(at.prompt_delta_ids)
        if at is not turn:
            own = np.concatenate([own, unpack_ints(at.output_ids)])
        start = at.prompt_len - len(unpack_ints(at.prompt_delta_ids))
        pieces.append(own if left is None else own[: max(0, left - start)])
        if at.id in before:
            at = before[at.id]  # whole: what continues it comes after it
            left = start if left is None else min(left, start)
        else:
            shared = at.shared_len
            left = shared if left is None else min(left, shared)
            at = by_id.get(at.parent) if at.parent is not None else None
    return np.concatenate(pieces[::-1])
