"""`create_chat_completions` of a sampler: OpenAI's messages in, OpenAI's answer out.

    response = await self.create_chat_completions(messages, tools=tools)
    messages.append(response.choices[0].message)         # the object, or a dictionary of it

Tokens stay exact underneath (`llm.py`): a message that shows an earlier answer stands for the
tokens that were sampled, with its thought and its calls as the model wrote them. All calls of a run
are sampled with the run's parameters, because it trains on their logprobs.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from agentrl.databases.documents import StopReason, ToolCall
from agentrl.rollout.agents.answers import extract_answer
from agentrl.rollout.agents.llm import ChatModel, ChatReply, OpenTurn
from agentrl.rollout.chat import Message, ToolSchema
from agentrl.rollout.tool_calls import ParsedCall

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

    from agentrl.rollout.agents.base import AsyncSampler

log = logging.getLogger(__name__)

_LENGTHS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
_SILENT = frozenset({"model", "priority", "task_type", "finish_status", "stream"})
_told: set[str] = set()  # options without effect that this process has named


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer as the agent sees it, and as the conversation has it.

    `before`: the messages that it answers. `calls`: as in `shown`, with their ids.
    """

    before: list[Message]
    shown: Message
    said: Message
    reply: ChatReply

    def is_shown_by(self, message: Message) -> bool:
        """Whether an assistant's message shows this answer: its text, and its calls if it has
        any."""
        calls = message.get("tool_calls")
        if _text(message) != self.shown["content"]:
            return False
        return not calls or _functions(calls) == _functions(self.shown.get("tool_calls", []))


class Completions:
    """The chat completions of one attempt."""

    def __init__(self, sampler: "AsyncSampler") -> None:
        self._sampler = sampler
        self._llm = ChatModel(sampler)
        self._answers: list[_Answer] = []
        self._answered: list[OpenTurn] = []  # turns whose calls have their results

    async def create(
        self,
        messages: Iterable[Any],
        tools: Sequence[ToolSchema] | None,
        options: Mapping[str, Any],
    ) -> "ChatCompletion":
        """Generate an answer.

        `messages`: dictionaries, or objects of the openai client. `options`: further arguments of a
        chat completion; those that set a length bound the answer. Raises `LimitReached` at the
        record's limits, and ValueError for more than one choice.
        """
        if options.get("n") not in (None, 1):
            raise ValueError(f"create_chat_completions gives one choice, not n={options['n']}")
        _tell(options)
        lengths = [options[name] for name in _LENGTHS if options.get(name) is not None]
        said = self._said([_plain(message) for message in messages])
        reply = await self._llm.chat(said, tuple(tools or ()), min(lengths, default=None))
        answer = _Answer(said, self._shown(reply), reply.message, reply)
        self._answers.append(answer)
        return self._completion(answer, str(options.get("model") or "policy"))

    async def finish(self, *, ended: bool) -> None:
        """The agent has ended: store the open turns, the stop reason and the answer.

        `ended`: whether it ended by itself, and not at a limit. The answer is what the agent left
        in `record.final_answer` or `record.meta_infos["final_answer"]`, or else its last answer's.
        """
        await self._llm.finish()
        record, last = self._sampler.record, self._answers[-1] if self._answers else None
        if not ended or last is None:
            return
        record.stop_reason = last.reply.stop_reason or record.stop_reason or StopReason.ANSWERED
        left = record.meta_infos.get("final_answer")
        if record.final_answer is None and isinstance(left, str):
            record.final_answer = left
        elif record.final_answer is None:
            schema = self._sampler.answer_schema
            record.final_answer = extract_answer(last.reply.content, schema)

    def _said(self, messages: list[Message]) -> list[Message]:
        """The messages as the conversation has them: earlier answers as they were sampled."""
        said: list[Message] = []
        last: _Answer | None = None
        results: list[Message] = []  # that follow the last answer
        for message in messages:
            answer = self._answer_in(message, said)
            if answer is not None:
                message = {**answer.said}
                last, results = answer, []
            elif message["role"] == "tool":
                results.append(message)
                message = {"role": "tool", "content": _text(message)}
            elif "tool_calls" in message:
                functions = _functions(message["tool_calls"])
                calls = [{"name": name, "arguments": value} for name, value in functions]
                message |= {"tool_calls": [{"type": "function", "function": c} for c in calls]}
            said.append(message)
        if last is not None:
            self._keep_results(last, results)
        return said

    def _answer_in(self, message: Message, before: list[Message]) -> _Answer | None:
        """The earlier answer that a message after `before` shows; None if it shows none."""
        if message["role"] != "assistant":
            return None
        shown = [answer for answer in self._answers if answer.is_shown_by(message)]
        here = [answer for answer in shown if answer.before == before]
        if here:
            return here[-1]
        # An agent that rewrote the messages before an answer still has it, unless it is empty.
        return shown[-1] if shown and (_text(message) or message.get("tool_calls")) else None

    def _keep_results(self, answer: _Answer, results: Sequence[Message]) -> None:
        """Store what tools of the agent's own answered to an answer's calls, with its turn."""
        turn = answer.reply.turn
        if not results or turn in self._answered:
            return
        self._answered.append(turn)
        calls = list(answer.shown.get("tool_calls", []))
        for result in results:
            named = [call for call in calls if call["id"] == result.get("tool_call_id")]
            if not calls or ("tool_call_id" in result and not named):
                continue
            call = named[0] if named else calls[0]
            calls.remove(call)
            [(name, arguments)] = _functions([call])
            made = ToolCall(name=name, arguments=arguments, result=_text(result))
            self._llm.keep_call(made, turn)
            self._sampler.record.n_tool_calls += 1

    def _shown(self, reply: ChatReply) -> Message:
        """The assistant's message of a reply. Calls that cannot be read stay in its text."""
        made = [call for call in reply.tool_calls if isinstance(call, ParsedCall)]
        if not reply.tool_calls or len(made) < len(reply.tool_calls):
            said = self._sampler.resources.renderer.said
            return {"role": "assistant", "content": said(reply.text)}
        place = sum(len(answer.reply.tool_calls) for answer in self._answers)
        calls = [
            {
                "id": self._sampler.resources.renderer.call_id(call.name, place + index),
                "type": "function",
                "function": {
                    "name": call.name, "arguments": orjson.dumps(call.arguments).decode()
                },
            }
            for index, call in enumerate(made)
        ]  # fmt: skip
        return {"role": "assistant", "content": reply.content, "tool_calls": calls}

    def _completion(self, answer: _Answer, model: str) -> "ChatCompletion":
        from openai.types.chat import ChatCompletion

        made = answer.reply.turn.generated.generation
        reason = "tool_calls" if answer.shown.get("tool_calls") else "stop"
        return ChatCompletion.model_validate(
            {
                "id": f"{self._sampler.record.id}-{len(self._answers) - 1}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": model,
                "choices": [
                    {
                        "index": 0,
                        "message": answer.shown,
                        "finish_reason": "length" if answer.reply.stop_reason else reason,
                        "logprobs": None,
                    }
                ],
                "usage": {
                    "prompt_tokens": made.prompt_tokens,
                    "completion_tokens": len(made.output_ids),
                    "total_tokens": made.prompt_tokens + len(made.output_ids),
                },
            }
        )


def _plain(message: Any) -> Message:
    """A message as a dictionary without what is None. Raises ValueError if it is none."""
    if hasattr(message, "model_dump"):
        message = message.model_dump()
    if not isinstance(message, Mapping) or "role" not in message:
        raise ValueError(
            f"a message needs a role and a content; create_chat_completions got {message!r:.200}"
        )
    return {"content": ""} | {key: value for key, value in message.items() if value is not None}


def _text(message: Message) -> str:
    """A message's content. Content in parts is that of its text parts."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def _functions(calls: Iterable[Any]) -> list[tuple[str, Any]]:
    """Name and arguments of calls, however the JSON of these is written."""
    functions = [call["function"] for call in calls if isinstance(call, Mapping)]
    return [(function["name"], _value(function["arguments"])) for function in functions]


def _value(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments


def _tell(options: Mapping[str, Any]) -> None:
    """Say once of each option that it has no effect."""
    for name in options.keys() - {*_LENGTHS, *_SILENT, "n"} - _told:
        _told.add(name)
        log.warning(
            "create_chat_completions(%s=...) has no effect: all turns of a run are sampled by its "
            "flags (--preferred_sampling_params), because their logprobs are trained",
            name,
        )
