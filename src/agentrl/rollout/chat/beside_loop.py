"""Runs work on long conversations in a thread, so that it does not delay heartbeats.

Rendering and encoding a prompt of 64k tokens takes 0.1 s. In a thread, the tokenizer releases
Python's lock, and Python switches threads between the steps of a template. Short conversations are
processed directly, which takes less time than switching threads.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

_AT_ONCE = 20_000  # characters; shorter work takes a few milliseconds

# One thread: the work holds Python's lock, and siblings can use the prompt that the first cached.
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="conversations")

Given = TypeVarTuple("Given")
Made = TypeVar("Made")


async def beside_loop(n_characters: int, work: Callable[[*Given], Made], *given: *Given) -> Made:
    """Run `work`, in a thread if its text is long; returns or raises what it does.

    `n_characters`: length of the text. Nothing else may touch what `work` changes until it is done.
    Cancelling the caller does not stop it.
    """
    if n_characters < _AT_ONCE:
        return work(*given)
    return await asyncio.get_running_loop().run_in_executor(_thread, work, *given)
