"""A stored turn as the request that asks a service for it again."""

import json
import shlex
from collections.abc import Sequence

from agentrl.databases.documents import DispatchedSamplingTask
from agentrl.rollout.groups.row_building import replay


def curl_command(turns: Sequence[DispatchedSamplingTask], number: int) -> str | None:
    """The command that sends the prompt of turn `number` to the service that answered it.

    `turns`: all of its Record. None if there is no such turn, or it has no tokens: it is another
    model's. Raises ValueError if the turns do not fit together.
    """
    turn = next((turn for turn in turns if turn.turn == number), None)
    if turn is None or not turn.output_ids:
        return None
    line = replay(turns[: number + 1]).line(turn.segment)
    body = {
        "input_ids": line["ids"][: turn.prompt_len].tolist(),
        "sampling_params": turn.params or {},
        "return_logprob": True,
    }
    words = [
        "curl", f"{turn.service}/generate", "-H", "Content-Type: application/json",
        "-d", json.dumps(body, separators=(",", ":")),
    ]  # fmt: skip
    return shlex.join(words)
