"""Watches over equal processes that a command of ours has started, until they or a signal end."""

import asyncio
import logging
from collections.abc import Sequence

from agentrl.launcher.processes import USER_ERROR, Change, Kind, Part, Supervisor
from agentrl.stop_signals import StopRequest, stop_signals

log = logging.getLogger(__name__)

_LOOK_S = 0.1


async def supervise(parts: Sequence[Part], kind: Kind) -> int:
    """Start the parts, which are of one kind, start again what dies, and hand signals on.

    A signal stops them in order, the same again at once. Returns 0 if all ended well, 2 if one was
    called wrongly, 1 if one died too often.
    """
    asked, at_once = StopRequest(), asyncio.Event()

    def take(number: int) -> None:
        if asked.take(number):
            at_once.set()

    loop = asyncio.get_running_loop()
    for each in stop_signals():
        loop.add_signal_handler(each, take, each)
    supervisor = Supervisor()
    for part in parts:
        supervisor.start(part)
    status = 0
    while supervisor.expected(kind) and asked.first is None:
        for event in supervisor.poll():
            if event.change is not Change.DONE:
                log.warning("%s", event.sentence)
            if event.change is Change.LOST:
                status = max(status, event.status if event.status == USER_ERROR else 1)
        await asyncio.sleep(_LOOK_S)
    stopping = asyncio.create_task(supervisor.stop(kind))
    while not stopping.done():
        if at_once.is_set():
            supervisor.hurry(kind)
            at_once.clear()
        await asyncio.wait({stopping}, timeout=_LOOK_S)
    stopping.result()
    return status
