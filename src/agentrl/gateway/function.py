"""`--agent_entry agent.py:run`: the user's code as a function, in the sampler's process.

    async def run(task, session):
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        ...
        return answer

It starts in no time, and what it imports is imported once. A function that is not async runs in a
thread of its own, so that those that wait for something keep no other one from running.
"""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agentrl.configs import ConfigError
from agentrl.configs.user_module import load_user_function
from agentrl.gateway.exchange import MODEL
from agentrl.gateway.outcome import Outcome
from agentrl.gateway.sessions import Session

Entry = Callable[[dict[str, Any], "EntrySession"], Any]


@dataclass(frozen=True)
class EntrySession:
    """What a function is given to reach the model.

    `base_url`: for OpenAI's clients; `anthropic_base_url`: for Anthropic's. `model`: its name;
    any other does as well.
    """

    base_url: str
    anthropic_base_url: str
    api_key: str
    model: str
    _session: Session

    def reward(
        self, reward: float, explanation: str | None = None, agent: str | None = None
    ) -> None:
        """Give the attempt its reward, instead of the task's scorer; the last one counts.

        `agent`: the reward is that agent's alone. Raises ValueError for what is no reward.
        """
        self._session.set_reward(float(reward), explanation, agent)


def load_entry(value: str) -> Entry:
    """The function of `--agent_entry`. Raises `ConfigError` if it cannot be used."""
    function = load_user_function(value, "agent_entry")
    try:
        inspect.signature(function).bind({}, None)
    except TypeError as error:
        raise ConfigError(f"--agent_entry {value}: must take (task, session): {error}") from None
    return function


async def run_function(entry: Entry, session: Session, url: str) -> Outcome:
    """Call the function for one attempt."""
    given = EntrySession(f"{url}/v1", url, session.key, MODEL, session)
    task = session.task_fields
    try:
        if inspect.iscoroutinefunction(entry):
            answer = await entry(task, given)
        else:
            answer = await _in_own_thread(entry, task, given)
    except Exception as error:  # the user's code may raise anything
        # As of a command: what comes after it said that it is done does not count.
        return Outcome(error=None if session.finished.is_set() else error)
    if answer is not None and not isinstance(answer, str):
        return Outcome(error=ValueError(f"the agent returned {answer!r:.200}, not a text or None"))
    return Outcome(answer=answer)


async def _in_own_thread(entry: Entry, task: dict[str, Any], session: EntrySession) -> object:
    """What the function returns or raises.

    The threads that the process shares are a few, and names of hosts are looked up in them too. A
    function that never returns keeps its thread, which ends with the process.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    ended = asyncio.Event()
    answers: list[object] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            answers.append(context.run(entry, task, session))
        except BaseException as error:  # the user's code may raise anything
            errors.append(error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(ended.set)

    thread = threading.Thread(target=call, name=f"agent of {session._session.id}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise RuntimeError(
            f"the agent's function never began: {threading.active_count()} threads run in this "
            f"process, and the machine allows no more ({error})"
        ) from None
    await ended.wait()
    if errors:
        raise errors[0]
    return answers[0]
