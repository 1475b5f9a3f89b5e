"""What became of a turn: one status, by what is worst about it. Pure functions."""

from collections.abc import Sequence

from agentrl.databases.documents import TurnStatus
from agentrl.rollout.tool_calls import Call, MalformedCall, tool_names
from agentrl.rollout.tool_calls.calls import Tools


def format_error(calls: Sequence[Call], tools: Tools) -> str | None:
    """The malformed calls and unknown tools of a turn, as a text; None if there are none."""
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

    `cut_off`: a limit truncated it. `looped`: it ends in a loop; takes precedence over `cut_off`.
    `malformed`: a call cannot be parsed or names an unknown tool. `repeated`: it repeats earlier
    calls with the same results. `failed`: a tool failed.
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
