"""Long work on conversations, beside a real event loop."""

import asyncio
import threading

from agentrl.rollout.chat import beside_loop


async def test_the_loop_goes_on_while_a_long_conversation_is_worked_on() -> None:
    went_on = threading.Event()
    asyncio.get_running_loop().call_later(0.01, went_on.set)
    assert await beside_loop(200_000, went_on.wait, 30.0)


async def test_a_short_one_is_worked_on_at_once() -> None:
    threads = [await beside_loop(n, threading.current_thread) for n in (100, 200_000)]
    assert threads[0] is threading.current_thread() is not threads[1]
