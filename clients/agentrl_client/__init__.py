"""Tasks of a run, for a program on any machine that reaches the run's gateway.

    import agentrl_client as agentrl
    from openai import OpenAI

    for task in agentrl.tasks("http://gateway:8800"):      # until the run is finished
        with agentrl.session(task) as s:
            model = OpenAI(base_url=s.base_url, api_key=s.api_key, max_retries=s.max_retries)
            ...                                            # the agent, with its own tools
            s.reward(1.0)

What is sent to a gateway that is away, as it is while it is started again, is sent again until it
answers. All of this is synchronous: a program that works on several tasks at once has a thread for
each, with a loop of its own.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2
from pydantic import BaseModel

__all__ = ["GatewayError", "Session", "SessionOver", "Task", "session", "tasks"]

log = logging.getLogger(__name__)

_POLL_S = 30.0  # for which a gateway holds a request for a task
_PATIENCE_S = 300.0  # for a gateway that is away
_REQUEST_S = 60.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 5.0
_OVER = 410


class GatewayError(RuntimeError):
    """The gateway refuses, or is away for too long. The message is one sentence."""


class SessionOver(GatewayError):
    """The session has ended: it was finished, or its program was silent for too long."""


class Task(BaseModel):
    """A task, and the session of the attempt at it.

    `task`: the line of the task file: `id`, `query`, `answer`, its `messages` and further fields.
    `split`: train or eval.
    """

    session: str
    key: str
    path: str
    split: str
    task: dict[str, Any]
    gateway: str

    @property
    def query(self) -> str:
        """What is asked."""
        return str(self.task["query"])


class Session:
    """An attempt at a task.

    `base_url`, `api_key`: for OpenAI's clients; `anthropic_base_url`: for Anthropic's.
    `max_retries`: with so many, they outlast a restart of the gateway.
    """

    max_retries = 20

    def __init__(self, task: Task) -> None:
        self.task = task.task
        self.id = task.session
        self.url = f"{task.gateway}{task.path}"
        self.base_url = f"{self.url}/v1"
        self.anthropic_base_url = self.url
        self.api_key = task.key
        self._finished = False

    def reward(
        self,
        reward: float | None,
        explanation: str | None = None,
        rewards: Mapping[str, float] | None = None,
    ) -> None:
        """Give the attempt its reward, instead of the task's scorer; the last one counts.

        `rewards`: further ones by name, as of a turn or an agent, which are kept beside it.
        Raises `SessionOver`.
        """
        told: dict[str, Any] = {"rewards": dict(rewards or {}), "explanation": explanation}
        if reward is not None:
            told["reward"] = reward
        self._post("/reward", told)

    def finish(self, answer: str | None = None) -> None:
        """The attempt is done; `answer`: its final answer, else the model's last one.

        The end of `with session(task)` does it too. Raises `SessionOver`.
        """
        if not self._finished:
            self._post("/finish", {"answer": answer})
            self._finished = True

    def fail(self, error: str) -> None:
        """The attempt has failed. Raises `SessionOver`."""
        self._post("/fail", {"error": error})
        self._finished = True

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        _post(f"{self.url}{path}", body, self.api_key)


@contextmanager
def session(task: Task) -> Iterator[Session]:
    """The session of a task, which is finished at the end, or failed by an exception.

    If the session is over before, as for a program that was asleep, the rest is left out.
    """
    opened = Session(task)
    try:
        yield opened
        opened.finish()
    except Exception as error:
        if isinstance(error, SessionOver) or getattr(error, "status_code", None) == _OVER:
            log.warning("%s: %s", task.session, error)
            return
        try:
            opened.fail(f"{type(error).__name__}: {error}")
        except GatewayError as refused:
            log.warning("%s: %s", task.session, refused)
        raise


def tasks(
    url: str | None = None, key: str | None = None, task_id: str | None = None
) -> Iterator[Task]:
    """Tasks, each as soon as one is due, until the run is finished.

    `url`, `key`: of the gateway, else AGENTRL_GATEWAY_URL and AGENTRL_GATEWAY_KEY. `task_id`: only
    attempts at this line of the tasks. Raises `GatewayError`.
    """
    url = (url or os.environ.get("AGENTRL_GATEWAY_URL") or "").rstrip("/")
    if not url:
        raise GatewayError("no gateway is given: set AGENTRL_GATEWAY_URL, as http://gateway:8800")
    key = key or os.environ.get("AGENTRL_GATEWAY_KEY") or ""
    asked = {"timeout": _POLL_S, "task_id": task_id}
    while True:
        try:
            response = _post(f"{url}/tasks/claim", asked, key, _POLL_S + _REQUEST_S)
        except SessionOver:
            return  # the run is finished
        if response.status_code == 200:
            yield Task(**response.json(), gateway=url)


def _post(
    url: str, body: Mapping[str, Any], key: str, timeout_s: float = _REQUEST_S
) -> httpx2.Response:
    """Post until there is an answer that is no failure of the gateway."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    deadline, pause_s = time.monotonic() + _PATIENCE_S, _FIRST_PAUSE_S
    while True:
        try:
            response = httpx2.post(url, json=dict(body), headers=headers, timeout=timeout_s)
            failure = f"{response.status_code} {response.text[:300]}"
            if response.status_code < 400:
                return response
            if response.status_code == _OVER:
                raise SessionOver(_message(response))
            if response.status_code < 500:
                raise GatewayError(f"{url} refuses: {_message(response)}")
        except httpx2.TransportError as error:
            failure = f"{type(error).__name__}: {error}"
        if time.monotonic() > deadline:
            raise GatewayError(f"{url} does not answer for {_PATIENCE_S:g} s: {failure}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)


def _message(response: httpx2.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"
