"""What became of a turn: one status, by what is worst about it. Pure functions."""

from collections.abc import Sequence

from agentrl.databases.documents import TurnStatus
from agentrl.rollout.tool_calls import Call, MalformedCall, tool_names
from agentrl.rollout.tool_calls.calls import Tools


def format_error(calls: Sequence[Call], tools: Tools) -> str | None:
    """What is wrong with a turn's calls, as they are written or in the tools' names; or None."""
    known = tool_names(tools) if calls else frozenset()
    faults = [
        call.error if isinstance(call, MalformedCall) else f"there is no tool {call.name[:80]}"
        for call in calls
        if isinstance(call, MalformedCall) or call.name not in known
    ]
    return "; ".join(faults) or None


def turn_status(
    *,
    cut_off: bool,
    looped: bool,
    malformed: bool,
    repeated: bool,
    failed: bool,
) -> TurnStatus:
    """The status of a turn.

    `cut_off`: it reached a limit before its end. `looped`: it ends in one stretch over and over,
    which says more than that it was cut off there. `malformed`: a call in it cannot be made, as it
    is written or because there is no such tool. `repeated`: it asks nothing new. `failed`: a tool
    that it called failed.
    """
    if looped:
        return TurnStatus.REPEAT_ERROR
    if cut_off:
        return TurnStatus.TRUNCATED
    if malformed:
        return TurnStatus.FORMAT_ERROR
    if repeated:
        return TurnStatus.REPEAT_ERROR
    return TurnStatus.TOOL_FAILED if failed else TurnStatus.COMPLETED
