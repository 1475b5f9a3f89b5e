"""What became of a turn: one status, by what is worst about it. A pure function."""

from agentrl.databases.documents import TurnStatus


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
