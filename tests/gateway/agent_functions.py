"""Functions for `--agent_entry`, which know nothing of training but where the model is."""

from typing import Any

import openai


def _messages(task: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": task["query"]}]


async def awaited(task: dict[str, Any], session: Any) -> str:
    client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
    messages = _messages(task)
    first = await client.chat.completions.create(model=session.model, messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": "Go on."}]
    last = await client.chat.completions.create(model=session.model, messages=messages)
    return str(last.choices[0].message.content)


def threaded(task: dict[str, Any], session: Any) -> None:
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    messages = _messages(task)
    first = client.chat.completions.create(model=session.model, messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": "Go on."}]
    client.chat.completions.create(model=session.model, messages=messages)
    session.reward(0.5)


async def raises(task: dict[str, Any], session: Any) -> str:
    return str(1 / 0)


async def short(task: dict[str, Any]) -> str:
    return "x"
