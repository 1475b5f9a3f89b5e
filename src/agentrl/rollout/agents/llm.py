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

from agentrl.databases.documents import (
    DispatchedSamplingTask,
    ProgramRequest,
    Rewrite,
    StopReason,
    ToolCall,
)
from agentrl.databases.records import turn_id
from agentrl.inference.generation_builder import OnTokens
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.agents.stored_turns import conversations_of
from agentrl.rollout.agents.turn import Turn
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
from agentrl.rollout.tool_calls import Call, ParsedCall, ParsedTurn

_FOLLOWING = frozenset({"tool", "user"})  # roles that may follow a reply


@dataclass(eq=False, slots=True)
class OpenTurn:
    """A turn that is not stored yet, because its tools may still answer."""

    generated: Turn
    added: list[Message]  # messages of the prompt beside those of `continues`
    format_error: str | None
    rewrite: Rewrite | None
    continues: tuple[int, int] | None = None  # an earlier turn, and how many messages of it
    request: ProgramRequest | None = None
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
    """A conversation that ends with a reply and can be continued.

    `earlier`: the turns of the conversation before the reply, where it was taken from the ledger.
    The conversation is then made again when it is continued, with the tools of that request.
    `no_tools_of_it`: tools with which it does not have these tokens.
    """

    conversation: Conversation | None
    tools: tuple[ToolSchema, ...]
    messages: list[Message]
    ids: list[int]
    reply: OpenTurn
    earlier: Sequence[OpenTurn] = ()
    no_tools_of_it: list[tuple[ToolSchema, ...]] = field(default_factory=list)

    def may_have(self, tools: tuple[ToolSchema, ...]) -> bool:
        """Whether its prompt may offer these tools."""
        if self.conversation is None:
            return tools not in self.no_tools_of_it
        return self.tools == tools


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt, and how it continues an earlier conversation, if it does (`next_prompt`)."""

    conversation: Conversation
    ids: list[int]
    added: list[Message]
    continues: tuple[int, int] | None
    next_prompt: NextPrompt | None = None


class ChatModel:
    """The policy, as the `llm` of one record's agent function."""

    def __init__(self, sampler: AsyncSampler) -> None:
        self.last: OpenTurn | None = None  # of the latest reply
        self._sampler = sampler
        self._threads: list[_Thread] = []
        self._ids_of: dict[str, tuple[int, ...]] = {}  # ids of replies by text
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
        while thread is not None and thread.conversation is None:
            await self._make_again(thread, schemas)
            thread = self._find_thread(messages, schemas)
        if thread is None:
            prompt = await self._begin(list(messages), schemas)
        else:
            prompt = await self._go_on(thread, messages[len(thread.messages) :])
            await self._store([thread.reply])
        context = sampler.context
        left = sampler.limits.room(context.n_turns + sampler.n_running, len(prompt.ids))
        sampler.n_running += 1
        try:
            on_tokens = watch and watch(prompt.ids)
            answer, cut_by = await sampler.ask(
                prompt.ids, left, max_new_tokens, stop, on_tokens, json_schema
            )
        finally:
            sampler.n_running -= 1
        if self._finished:
            raise RuntimeError("the agent has answered before this reply came, which is lost")
        rewrite = Rewrite.AGENT if thread is None and context.n_turns else None
        generated = sampler.add_answer(prompt.ids, answer, cut_by, prompt.next_prompt)
        parsed = ParsedTurn(generated.text)
        if schemas and generated.stop_reason is None:
            parsed = sampler.resources.renderer.parse_calls(generated.text, schemas)
        fault = format_error(parsed.calls, schemas)
        turn = OpenTurn(
            generated, prompt.added, fault, rewrite, prompt.continues, agent=agent, trained=trained
        )
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

    def go_on_after(self, stored: Sequence[DispatchedSamplingTask]) -> list[ChatReply]:
        """Take up a record where its stored turns end; returns its own replies, in order.

        Raises ValueError if the turns do not fit together.
        """
        replies: list[ChatReply] = []
        lines: list[list[OpenTurn]] = []  # for each turn, those of its conversation
        turns, told = iter(self._sampler.go_on_after(stored)), conversations_of(stored)
        for document, messages in zip(stored, told, strict=True):
            if not document.output_ids:  # of another model
                lines.append([])
                continue
            generated = next(turns)
            begun = document.rewrite is not None or document.continues is None
            rewrite = None if document.rewrite is None else Rewrite(document.rewrite)
            continues = None
            if document.continues is not None:
                continues = (document.continues, document.n_continued)
            turn = OpenTurn(
                generated, list(document.messages), document.format_error, rewrite, continues,
                document.request, agent=document.agent, trained=document.trained,
            )  # fmt: skip
            earlier = [] if begun or continues is None else lines[continues[0]]
            lines.append([*earlier, turn])
            if earlier:  # continued, so it is no end of a conversation any more
                self._threads = [t for t in self._threads if t.reply is not earlier[-1]]
            line = self._sampler.context.line(document.segment)["ids"]
            ids = line[: document.prompt_len].tolist() + list(generated.generation.output_ids)
            self._threads.append(_Thread(None, (), messages, ids, turn, earlier))
            self._ids_of[generated.text] = generated.generation.output_ids
            calls = tuple(ParsedCall(call.name, call.arguments) for call in document.tool_calls)
            content = self._sampler.resources.renderer.said(generated.text)
            reason = generated.stop_reason
            thinking = self._sampler.resources.renderer.begins_thought(ids[: document.prompt_len])
            replies.append(
                ChatReply(messages[-1], generated.text, content, calls, reason, turn, thinking)
            )
            self.last = turn
        return replies

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
            if thread.may_have(tools)
            and len(thread.messages) < len(messages)
            and list(messages[: len(thread.messages)]) == thread.messages
            and {message["role"] for message in messages[len(thread.messages) :]} <= _FOLLOWING
        ]
        return max(fitting, key=lambda thread: len(thread.messages), default=None)

    async def _go_on(self, thread: _Thread, added: Sequence[Message]) -> _Prompt:
        self._threads.remove(thread)  # a second call after the same reply begins a segment
        assert thread.conversation is not None, "it was made again"
        ids, next_prompt = await _extended(thread.conversation, thread.ids, thread.reply, added)
        continues = (thread.reply.generated.tokens.turn, len(thread.messages))
        return _Prompt(thread.conversation, ids, list(added), continues, next_prompt)

    async def _make_again(self, thread: _Thread, tools: tuple[ToolSchema, ...]) -> None:
        """Make the conversation of a thread of the ledger, if with these tools it has its ids."""
        first, *later = [*thread.earlier, thread.reply]
        n_later = sum(len(turn.added) + 1 for turn in later)
        prompt = await self._begin(thread.messages[: len(thread.messages) - n_later - 1], tools)
        ids, before = prompt.ids, first
        for turn in later:
            ids = [*ids, *before.generated.generation.output_ids]
            ids, _ = await _extended(prompt.conversation, ids, before, turn.added)
            before = turn
        if [*ids, *before.generated.generation.output_ids] == thread.ids:
            thread.conversation, thread.tools = prompt.conversation, tools
        else:
            thread.no_tools_of_it.append(tools)

    async def _begin(self, messages: list[Message], tools: tuple[ToolSchema, ...]) -> _Prompt:
        entries = [Entry(message, self._generated(message)) for message in messages]
        given = next((i for i, entry in enumerate(entries) if entry.output_ids), len(entries))
        begun = messages[:given] or messages
        size, renderer = n_characters(messages), self._sampler.resources.renderer
        conversation = await beside_loop(size, Conversation, renderer, begun, tools)
        continues = self._shared(messages)
        added = messages[continues[1] if continues else 0 :]
        if given == len(entries):
            return _Prompt(conversation, list(conversation.prompt_ids), added, continues)
        next_prompt = await beside_loop(size, conversation.rewrite, entries)
        return _Prompt(conversation, list(next_prompt.ids), added, continues, next_prompt)

    def _shared(self, messages: Sequence[Message]) -> tuple[int, int] | None:
        """The turn whose messages begin most as these do, and how many are the same."""
        shared = [
            (_n_common(thread.messages, messages), thread.reply.generated.tokens.turn)
            for thread in self._threads
        ]
        n_messages, turn = max(shared, default=(0, 0))
        return (turn, n_messages) if n_messages else None

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
            continues=turn.continues,
            request=turn.request,
            agent=turn.agent,
            trained=turn.trained,
        )


async def _extended(
    conversation: Conversation, ids: list[int], reply: OpenTurn, added: Sequence[Message]
) -> tuple[list[int], NextPrompt]:
    """The prompt after a reply with `ids` up to its end, and how it follows."""
    size = conversation.n_characters + n_characters(added)
    said = reply.generated.generation
    next_prompt = await beside_loop(size, conversation.extend, said.output_ids, added)
    return [*(ids if next_prompt.extends else []), *next_prompt.ids], next_prompt


def _n_common(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages both begin with."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
