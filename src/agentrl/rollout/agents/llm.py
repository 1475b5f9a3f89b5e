"""The `llm` of an agent function: chat messages in, a reply out; tokens stay exact underneath.

    reply = await llm.chat(messages, tools.schemas)
    messages += [reply.message, *await tools.answer(reply)]

If messages continue an earlier call (its messages, its reply, then tool or user messages), they
extend its tokens. Other messages begin a segment: a new conversation, or an earlier one with
changes. Unchanged replies in it keep their sampled ids. Calls may run concurrently. Every reply is
a turn of the record.
"""

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from agentrl.databases.documents import Rewrite, StopReason, ToolCall
from agentrl.databases.records import turn_id
from agentrl.inference.generation_builder import OnTokens
from agentrl.rollout.agents.base import AsyncSampler, Turn
from agentrl.rollout.agents.turn_status import format_error
from agentrl.rollout.chat import (
    Conversation,
    Entry,
    Message,
    NextPrompt,
    ToolSchema,
    beside_loop,
    n_characters,
)
from agentrl.rollout.tool_calls import Call, ParsedTurn

_FOLLOWING = frozenset({"tool", "user"})  # roles that may follow a reply


@dataclass(eq=False, slots=True)
class OpenTurn:
    """A turn that is not stored yet, because its tools may still answer."""

    generated: Turn
    added: list[Message]  # messages added before the turn, for display
    format_error: str | None
    rewrite: Rewrite | None
    calls: list[ToolCall] = field(default_factory=list)
    tools_latency_s: float = 0.0
    agent: str | None = None
    trained: bool = True
    generated_at: float = field(default_factory=time.monotonic)

    def add_call(self, call: ToolCall) -> None:
        """Add a call that was made for this turn."""
        self.calls.append(call)
        self.tools_latency_s = time.monotonic() - self.generated_at


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A reply of the model.

    `message`: to be appended to the messages. `text`: the whole text with control tokens.
    `content`: the text without calls and control tokens. `tool_calls`: in order, malformed ones
    included. `stop_reason`: the limit that truncated the reply, if any; it then has no calls.
    `thinking`: whether its prompt has begun its thought.
    """

    message: Message
    text: str
    content: str
    tool_calls: tuple[Call, ...]
    stop_reason: StopReason | None
    turn: OpenTurn = field(repr=False)
    thinking: bool = False


@dataclass(eq=False, slots=True)
class _Thread:
    """A conversation that ends with a reply and can be continued."""

    conversation: Conversation
    tools: tuple[ToolSchema, ...]
    messages: list[Message]
    ids: list[int]
    reply: OpenTurn


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt, and how it continues an earlier conversation, if it does (`next_prompt`)."""

    conversation: Conversation
    ids: list[int]
    added: list[Message]
    next_prompt: NextPrompt | None = None


class ChatModel:
    """The policy, as the `llm` of one record's agent function."""

    def __init__(self, sampler: AsyncSampler) -> None:
        self.last: OpenTurn | None = None  # of the latest reply
        self._sampler = sampler
        self._threads: list[_Thread] = []
        self._ids_of: dict[str, tuple[int, ...]] = {}  # ids of replies by text
        self._n_running = 0
        self._open: list[OpenTurn] = []
        self._finished = False

    def task_messages(self) -> list[Message]:
        """The first messages of the conversation: `--system_prompt`, then the task's messages or
        its query."""
        return self._sampler.opening_messages()

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        *,
        agent: str | None = None,
        trained: bool = True,
        watch: Callable[[Sequence[int]], OnTokens] | None = None,
        json_schema: str | None = None,
    ) -> ChatReply:
        """Generate a reply to these messages.

        `messages`: OpenAI's format, with role and content. `tools`: schemas in the prompt; without
        any, replies are not parsed for calls. `stop`: texts that end a reply, which has the first
        of them at its end. `agent`, `trained`: as in `AsyncSampler.write_turn`. `watch`: gets the
        ids of the prompt, and returns what gets those of the reply, as they come. `json_schema`: of
        the reply, which must then not be `trained`. Raises `LimitReached` at the record's limits,
        and `TemplateRefusal` if the chat template rejects the messages.
        """
        assert json_schema is None or not trained, "its logprobs are not those of the policy"
        schemas, sampler = tuple(tools), self._sampler
        messages = deepcopy(messages)  # the agent may change its own
        sampler.note_tools(schemas)
        thread = self._find_thread(messages, schemas)
        if thread is None:
            prompt = await self._begin(list(messages), schemas)
        else:
            prompt = await self._go_on(thread, messages[len(thread.messages) :])
            await self._store([thread.reply])
        context = sampler.context
        left = sampler.limits.room(context.n_turns + self._n_running, len(prompt.ids))
        self._n_running += 1
        try:
            on_tokens = watch and watch(prompt.ids)
            answer, cut_by = await sampler.ask(
                prompt.ids, left, max_new_tokens, stop, on_tokens, json_schema
            )
        finally:
            self._n_running -= 1
        if self._finished:
            raise RuntimeError("the agent has answered before this reply came, which is lost")
        rewrite = Rewrite.AGENT if thread is None and context.n_turns else None
        generated = sampler.add_answer(prompt.ids, answer, cut_by, prompt.next_prompt)
        parsed = ParsedTurn(generated.text)
        if schemas and generated.stop_reason is None:
            parsed = sampler.resources.renderer.parse_calls(generated.text, schemas)
        fault = format_error(parsed.calls, schemas)
        turn = OpenTurn(generated, prompt.added, fault, rewrite, agent=agent, trained=trained)
        message: Message = {"role": "assistant", "content": generated.text}
        ids = [*prompt.ids, *answer.output_ids]
        self._threads.append(
            _Thread(prompt.conversation, schemas, [*messages, {**message}], ids, turn)
        )
        self._ids_of[generated.text] = answer.output_ids
        self._open.append(turn)
        self.last = turn
        content = sampler.resources.renderer.said(parsed.content)
        thinking = sampler.resources.renderer.begins_thought(prompt.ids)
        return ChatReply(
            message, generated.text, content, parsed.calls, generated.stop_reason, turn, thinking
        )

    def keep_call(self, call: ToolCall, turn: OpenTurn | None) -> None:
        """Add a call to a turn, or to the record if the turn is None or already stored."""
        if turn in self._open:
            turn.add_call(call)
        else:
            self._sampler.record.own_calls.append(call)

    async def store(self, reply: ChatReply) -> None:
        """Store the turn of a reply now: its calls, if it has any, are made elsewhere."""
        await self._store([reply.turn])

    async def finish(self) -> None:
        """The agent has ended: store the open turns. Later replies raise RuntimeError."""
        self._finished = True
        await self._store(list(self._open))
        record = self._sampler.record
        record.turns = [turn_id(record.id, turn) for turn in range(record.n_turns)]

    def _find_thread(
        self, messages: Sequence[Message], tools: tuple[ToolSchema, ...]
    ) -> _Thread | None:
        """The longest conversation that the messages continue; None if there is none."""
        fitting = [
            thread
            for thread in self._threads
            if thread.tools == tools
            and len(thread.messages) < len(messages)
            and list(messages[: len(thread.messages)]) == thread.messages
            and {message["role"] for message in messages[len(thread.messages) :]} <= _FOLLOWING
        ]
        return max(fitting, key=lambda thread: len(thread.messages), default=None)

    async def _go_on(self, thread: _Thread, added: Sequence[Message]) -> _Prompt:
        self._threads.remove(thread)  # a second call after the same reply begins a segment
        said = thread.reply.generated.generation
        size = thread.conversation.n_characters + n_characters(added)
        next_prompt = await beside_loop(size, thread.conversation.extend, said.output_ids, added)
        before = thread.ids if next_prompt.extends else []
        ids = [*before, *next_prompt.ids]
        return _Prompt(thread.conversation, ids, list(added), next_prompt)

    async def _begin(self, messages: list[Message], tools: tuple[ToolSchema, ...]) -> _Prompt:
        entries = [Entry(message, self._generated(message)) for message in messages]
        given = next((i for i, entry in enumerate(entries) if entry.output_ids), len(entries))
        begun = messages[:given] or messages
        size, renderer = n_characters(messages), self._sampler.resources.renderer
        conversation = await beside_loop(size, Conversation, renderer, begun, tools)
        unsaid = self._unsaid(entries)
        if given == len(entries):
            return _Prompt(conversation, list(conversation.prompt_ids), unsaid)
        next_prompt = await beside_loop(size, conversation.rewrite, entries)
        return _Prompt(conversation, list(next_prompt.ids), unsaid, next_prompt)

    def _unsaid(self, entries: Sequence[Entry]) -> list[Message]:
        """The messages that are in no conversation of the record yet."""
        said = [message for thread in self._threads for message in thread.messages]
        return [
            entry.message for entry in entries if not entry.output_ids and entry.message not in said
        ]

    def _generated(self, message: Message) -> tuple[int, ...]:
        """The sampled ids of a message that is an unchanged reply; () for any other message."""
        content = message["content"] if message["role"] == "assistant" else None
        return self._ids_of.get(content, ()) if isinstance(content, str) else ()

    async def _store(self, turns: Sequence[OpenTurn]) -> None:
        for turn in turns:
            if turn not in self._open:
                continue
            self._open.remove(turn)
            try:
                await self._write(turn)
            except Exception:
                self._open.append(turn)  # it is of the record, and must be stored
                raise

    async def _write(self, turn: OpenTurn) -> None:
        await self._sampler.write_turn(
            turn.generated,
            turn.added,
            tool_calls=turn.calls,
            format_error=turn.format_error,
            tools_latency_s=turn.tools_latency_s,
            rewrite=turn.rewrite,
            agent=turn.agent,
            trained=turn.trained,
        )
