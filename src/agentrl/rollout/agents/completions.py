"""`create_chat_completions` of a sampler: OpenAI's messages in, OpenAI's answer out.

    response = await self.create_chat_completions(messages, tools=tools)
    messages.append(response.choices[0].message)         # the object, or a dictionary of it

Tokens stay exact underneath (`llm.py`): a message that shows an earlier answer stands for the
tokens that were sampled (`shown_answers.py`). All calls of a run
are sampled with the run's parameters, because it trains on their logprobs.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from agentrl.databases.documents import StopReason, ToolCall
from agentrl.rollout.agents.answers import extract_answer
from agentrl.rollout.agents.llm import ChatModel, ChatReply, OpenTurn
from agentrl.rollout.agents.shown_answers import (
    ShownAnswer,
    ShownAnswers,
    call_message,
    functions_of,
    readable_calls,
)
from agentrl.rollout.chat import Message, ToolSchema

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

    from agentrl.rollout.agents.base import AsyncSampler

log = logging.getLogger(__name__)

_LENGTHS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
_SILENT = frozenset({"model", "priority", "task_type", "finish_status", "stream"})
_told: set[str] = set()  # options without effect that this process has named


class Completions:
    """The chat completions of one attempt."""

    def __init__(self, sampler: "AsyncSampler") -> None:
        self._sampler = sampler
        self._llm = ChatModel(sampler)
        self._shown = ShownAnswers()
        self._last: ChatReply | None = None
        self._n_answers = 0
        self._n_calls = 0
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
        self._last = reply
        self._n_answers += 1
        answer = ShownAnswer(said, self._show(reply), reply)
        # An agent may leave the calls out where it shows the answer.
        without_calls = {name: answer.shown[name] for name in ("role", "content")}
        self._shown.add(answer, without_calls)
        return self._completion(answer, str(options.get("model") or "policy"))

    async def finish(self, *, ended: bool) -> None:
        """The agent has ended: store the open turns, the stop reason and the answer.

        `ended`: whether it ended by itself, and not at a limit. The answer is what the agent left
        in `record.final_answer` or `record.meta_infos["final_answer"]`, or else its last answer's.
        """
        await self._llm.finish()
        record, last = self._sampler.record, self._last
        if not ended or last is None:
            return
        record.stop_reason = last.stop_reason or record.stop_reason or StopReason.ANSWERED
        left = record.meta_infos.get("final_answer")
        if record.final_answer is None and isinstance(left, str):
            record.final_answer = left
        elif record.final_answer is None:
            schema = self._sampler.answer_schema
            record.final_answer = extract_answer(last.content, schema)

    def _said(self, messages: list[Message]) -> list[Message]:
        """The messages as the conversation has them: earlier answers as they were sampled."""
        read = self._shown.read(messages)
        if read.last is not None:
            self._keep_results(read.last, read.results)
        return read.messages

    def _keep_results(self, answer: ShownAnswer, results: Sequence[Message]) -> None:
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
            [(name, arguments)] = functions_of({"tool_calls": [call]})
            made = ToolCall(name=name, arguments=arguments, result=result["content"])
            self._llm.keep_call(made, turn)
            self._sampler.record.n_tool_calls += 1

    def _show(self, reply: ChatReply) -> Message:
        """The assistant's message of a reply. Calls that cannot be read stay in its text."""
        renderer, made = self._sampler.resources.renderer, readable_calls(reply)
        place = self._n_calls
        self._n_calls += len(reply.tool_calls)
        if not made:
            return {"role": "assistant", "content": renderer.said(reply.text)}
        calls = [
            call_message(
                renderer.call_id(call.name, place + index),
                call.name,
                orjson.dumps(call.arguments).decode(),
            )
            for index, call in enumerate(made)
        ]
        return {"role": "assistant", "content": reply.content, "tool_calls": calls}

    def _completion(self, answer: ShownAnswer, model: str) -> "ChatCompletion":
        from openai.types.chat import ChatCompletion

        made = answer.reply.turn.generated.generation
        reason = "tool_calls" if answer.shown.get("tool_calls") else "stop"
        return ChatCompletion.model_validate(
            {
                "id": f"{self._sampler.record.id}-{self._n_answers - 1}",
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
    """A message as a dictionary without what is None, and with a text as its content.

    Raises ValueError if it is none.
    """
    if hasattr(message, "model_dump"):
        message = message.model_dump()
    if not isinstance(message, Mapping) or "role" not in message:
        raise ValueError(
            f"a message needs a role and a content; create_chat_completions got {message!r:.200}"
        )
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _text(plain.get("content", ""))
    if "tool_calls" in plain:
        calls = [call for call in plain["tool_calls"] if isinstance(call, Mapping)]
        functions = functions_of({"tool_calls": calls})
        plain["tool_calls"] = [
            call_message(str(call.get("id")), *function)
            for call, function in zip(calls, functions, strict=True)
        ]
    return plain


def _text(content: Any) -> str:
    """A content. One in parts is that of its text parts."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def _tell(options: Mapping[str, Any]) -> None:
    """Say once of each option that it has no effect."""
    for name in options.keys() - {*_LENGTHS, *_SILENT, "n"} - _told:
        _told.add(name)
        log.warning(
            "create_chat_completions(%s=...) has no effect: all turns of a run are sampled by its "
            "flags (--preferred_sampling_params), because their logprobs are trained",
            name,
        )
