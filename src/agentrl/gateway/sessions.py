"""A session: what the program of one attempt asks the model, and the reward that it reports.

Every answer is a turn of the attempt's Record, which is stored before the answer leaves. A request
that a client repeats, because the answer was lost on the way, gets the same answer again. What a
session knows follows from its stored turns: after a crash it goes on from them.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np

from agentrl.databases.documents import (
    DispatchedSamplingTask,
    ProgramRequest,
    Split,
    StopReason,
    ToolCall,
)
from agentrl.gateway.exchange import Call, ChatAnswer, ChatRequest, spoken_message
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.agents.limits import LimitReached
from agentrl.rollout.agents.llm import ChatModel, ChatReply
from agentrl.rollout.agents.shown_answers import ShownAnswer, ShownAnswers, readable_calls
from agentrl.rollout.agents.stored_turns import conversations_of
from agentrl.rollout.chat import Message, ToolSchema

REWARD = "reward"  # key of the reported reward in its Record's `scores`
_FINISHED = "program_finished"  # key in its Record's `meta_infos`: what `finish` was told


log = logging.getLogger(__name__)


class SessionOver(Exception):
    """The attempt has ended: nothing more is answered."""


class RunOver(Exception):
    """The run is finished: there are no more tasks."""


class _Asked(NamedTuple):
    """A request that is answered or was. `number`: its place in the session."""

    number: int
    answers: "asyncio.Task[list[ChatAnswer]]"


class Session:
    """The conversations of one attempt.

    `id`: the Record's. `key`: what clients show. `last`: the latest answer of the model. `limit`:
    the limit of the Record that refused a request, if one did. `answer`: the final answer, if the
    program gave one. `heard_at`: when the program last asked something (monotonic clock).
    """

    def __init__(self, sampler: AsyncSampler, key: str) -> None:
        self.id = sampler.record.id
        self.key = key
        self.last: ChatAnswer | None = None
        self.limit: StopReason | None = None
        self.answer: str | None = None
        self.error: str | None = None  # why the program failed, if it says so
        self.finished = asyncio.Event()  # the program said that it is done
        self.heard_at = time.monotonic()
        self._n_asking = 0
        self._sampler = sampler
        self._llm = ChatModel(sampler)
        self._shown = ShownAnswers()
        self._conversations: dict[int, list[Message]] = {}  # by the turn that ends them
        self._n_asked = 0
        self._asked: dict[str, _Asked] = {}  # by digest of the request
        self._stored: dict[str, dict[int, ChatReply]] = {}  # by digest, and then by choice
        self._undelivered: set[str] = set()  # digests of requests whose answer got lost
        self._answering: set[asyncio.Task[list[ChatAnswer]]] = set()
        self._storing: set[asyncio.Task[Any]] = set()
        self._in_order = asyncio.Lock()  # turns are stored in the order of their numbers
        self._over = False

    @contextmanager
    def asking(self) -> Iterator[None]:
        """The program asks something, and waits for the answer."""
        self._n_asking += 1
        try:
            yield
        finally:
            self._n_asking -= 1
            self.heard_at = time.monotonic()

    @property
    def is_busy(self) -> bool:
        """Whether the program waits for an answer."""
        return self._n_asking > 0

    @property
    def split(self) -> Split:
        """Whether the attempt is one of the training or of an evaluation."""
        return Split(self._sampler.record.split)

    @property
    def task_fields(self) -> dict[str, Any]:
        """The task of the attempt, as its line in the task file."""
        task = self._sampler.claim.task
        given: dict[str, Any] = {"id": task.task_id, "query": task.query, "answer": task.answer}
        if task.messages:
            given["messages"] = task.messages
        return deepcopy({**task.fields, **given})

    def resume(
        self, turns: Sequence[DispatchedSamplingTask], tools: Sequence[ToolSchema] = ()
    ) -> None:
        """Go on after the stored turns of the attempt. `tools`: of its first prompt with tools.

        Raises ValueError if the turns do not fit together.
        """
        finished = self._sampler.record.meta_infos.get(_FINISHED)
        if finished is not None:
            self.answer = finished["answer"]
            self.finished.set()
        if not turns:
            return
        for turn, messages, reply in zip(
            turns, conversations_of(turns), self._llm.go_on_after(turns), strict=True
        ):
            request = turn.request
            stopped_by = request.stopped_by if request else None
            stop = (stopped_by,) if stopped_by else ()
            answer = self._read(reply, ChatRequest([], tools, stop=stop))
            self._remember(answer, reply, messages[:-1])
            if request is None:
                continue
            if request.choice == 0:
                self._stored[request.digest] = {}
                self._undelivered.discard(request.digest)
            self._stored.setdefault(request.digest, {})[request.choice] = reply
            self._n_asked = max(self._n_asked, request.number + 1)
            if not request.delivered:
                self._undelivered.add(request.digest)

    async def ask(self, request: ChatRequest, digest: str, *, repeated: bool) -> list[ChatAnswer]:
        """The `n` answers to a request.

        `digest`: equal for equal requests. `repeated`: the client says that it asked before; else a
        request is a repetition if the answer to an equal one got lost. A client that hangs up stops
        nothing, because it may ask again. Raises `SessionOver`, `LimitReached`, `TemplateRefusal`,
        and the errors of `AsyncSampler.ask`.
        """
        self.check_open()
        repeated = repeated or digest in self._undelivered
        self._undelivered.discard(digest)
        earlier = self._asked.get(digest) if repeated else None
        if earlier is None or _has_failed(earlier.answers):
            known = self._stored.pop(digest, {}) if repeated else {}
            number = self._n_asked
            if known:
                [number] = {_request_of(reply).number for reply in known.values()}
                log.info("%s: request %d is answered from the ledger", self.id, number)
            self._n_asked += not known
            answers = asyncio.create_task(
                self._answer(request, number, digest, known), name=f"answer in {self.id}"
            )
            answers.add_done_callback(self._answered)
            self._answering.add(answers)
            earlier = self._asked[digest] = _Asked(number, answers)
        return await asyncio.shield(earlier.answers)

    def delivered(self, digest: str, *, whole: bool) -> None:
        """The answer to a request has left for the client. `whole`: and arrived, as it seems."""
        asked = self._asked.get(digest)
        if asked is None or not asked.answers.done() or _has_failed(asked.answers):
            return
        if not whole:
            self._undelivered.add(digest)
            return
        turns = [answer.turn for answer in asked.answers.result()]
        records = self._sampler.resources.records
        noting = asyncio.create_task(records.delivered(self.id, turns), name=f"note in {self.id}")
        self._storing.add(noting)
        noting.add_done_callback(self._noted)

    def check_open(self) -> None:
        """Raise `SessionOver` if the attempt has ended."""
        if self._over:
            raise SessionOver(f"the attempt {self.id} has ended")

    def conversation(self, turn: int) -> list[Message] | None:
        """The messages up to the answer of a turn, as the program knows them; None without it."""
        return self._conversations.get(turn)

    def count_tokens(self, request: ChatRequest) -> int:
        """The number of tokens of the request's prompt."""
        messages = self._shown.read(request.messages).messages
        return len(self._sampler.resources.renderer.render_prompt(messages, request.tools))

    def set_reward(
        self,
        reward: float | None,
        explanation: str | None = None,
        rewards: Mapping[str, float] | None = None,
    ) -> None:
        """Take the reward of the attempt; the last one counts. Raises `SessionOver`.

        `rewards`: further ones by name, of a turn or an agent, which are kept beside it.
        """
        self.check_open()
        record = self._sampler.record
        record.scores.update(rewards or {})
        if reward is not None:
            record.scores[REWARD] = reward
        if explanation:
            record.explanations[REWARD] = explanation

    async def keep(self) -> None:
        """Store the rewards so far."""
        await self._sampler.resources.records.note(self._sampler.record)

    def fail(self, error: str) -> None:
        """The program failed, and the attempt with it. Raises `SessionOver`."""
        self.check_open()
        self.error = error
        self.finished.set()

    async def finish(self, answer: str | None = None) -> None:
        """The program is done; this is stored. `answer`: its final answer."""
        self.check_open()
        self._sampler.record.meta_infos[_FINISHED] = {"answer": answer}
        await self.keep()
        self.answer = answer
        self.finished.set()

    async def close(self) -> None:
        """End the session: answers that are being stored are stored, others are not made."""
        self._over = True
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        await asyncio.gather(*self._storing, return_exceptions=True)
        await self._llm.finish()

    async def _answer(
        self, request: ChatRequest, number: int, digest: str, known: Mapping[int, ChatReply]
    ) -> list[ChatAnswer]:
        """`known`: answers that are stored, by their choice."""
        messages = self._shown.read(request.messages).messages

        async def one(choice: int) -> ChatAnswer:
            if choice in known:
                return self._read(known[choice], request)
            asked = ProgramRequest(number=number, choice=choice, digest=digest)
            return await self._one_answer(request, messages, asked)

        try:
            return await asyncio.gather(*map(one, range(request.n)))
        except LimitReached as reached:
            self.limit = reached.stop_reason
            raise

    async def _one_answer(
        self, request: ChatRequest, messages: Sequence[Message], asked: ProgramRequest
    ) -> ChatAnswer:
        reply = await self._llm.chat(
            messages, request.tools, request.max_new_tokens, stop=request.stop
        )
        # A turn of the record from here on: stored, also if the session ends now.
        storing = asyncio.create_task(
            self._keep(reply, request, messages, asked), name=f"turn of {self.id}"
        )
        self._storing.add(storing)
        storing.add_done_callback(self._storing.discard)
        return await asyncio.shield(storing)

    async def _keep(
        self,
        reply: ChatReply,
        request: ChatRequest,
        messages: Sequence[Message],
        asked: ProgramRequest,
    ) -> ChatAnswer:
        answer = self._read(reply, request)
        reply.turn.request = asked.model_copy(update={"stopped_by": answer.stopped_by})
        self._remember(answer, reply, messages)
        for call in answer.calls:
            made = ToolCall(name=call.name, arguments=dict(call.arguments))
            self._llm.keep_call(made, reply.turn)
        self._sampler.record.n_tool_calls += len(answer.calls)
        async with self._in_order:
            await self._llm.store(reply)
        return answer

    def _remember(self, answer: ChatAnswer, reply: ChatReply, messages: Sequence[Message]) -> None:
        """Know the answer to these messages again, in whatever words the client repeats it."""
        shown = spoken_message(answer)
        # Some clients put back the text that ended an answer.
        whole = {**shown, "content": answer.content + (answer.stopped_by or "")}
        self._shown.add(ShownAnswer(messages, shown, reply), whole)
        self._conversations[answer.turn] = [*messages, shown]
        self.last = answer

    def _read(self, reply: ChatReply, request: ChatRequest) -> ChatAnswer:
        """The answer that the client gets."""
        renderer, made = self._sampler.resources.renderer, reply.turn.generated.generation
        reading = renderer.read_turn(reply.text, tools=request.tools)
        number = reply.turn.generated.tokens.turn
        calls = tuple(
            Call(f"call_{number}_{place}", call.name, call.arguments)
            for place, call in enumerate(readable_calls(reply))
        )
        # Calls that cannot be read stay in the text.
        content = renderer.said(reading.content if calls else reading.text[len(reading.lead) :])
        stopped_by = None if calls else _first_of(request.stop, content)
        if stopped_by is not None:
            content = content[: content.index(stopped_by)]
        tokens = []
        if request.logprobs:
            texts = [renderer.codec.decode([token]) for token in made.output_ids]
            logprobs = np.asarray(made.output_logprobs, np.float32)  # as they are stored
            tokens = list(zip(texts, logprobs.tolist(), strict=True))
        return ChatAnswer(
            content=content,
            thought=reading.thought,
            calls=calls,
            stopped_by=stopped_by,
            cut_off=reply.stop_reason is not None,
            prompt_tokens=made.prompt_tokens,
            cached_tokens=made.cached_tokens,
            completion_tokens=len(made.output_ids),
            tokens=tokens,
            turn=number,
        )

    def _noted(self, task: "asyncio.Task[Any]") -> None:
        self._storing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("a delivery in %s is not noted: %s", self.id, error)

    def _answered(self, task: "asyncio.Task[list[ChatAnswer]]") -> None:
        self._answering.discard(task)
        if not task.cancelled():
            task.exception()  # the client may have hung up


def _has_failed(answers: "asyncio.Task[list[ChatAnswer]]") -> bool:
    return answers.done() and (answers.cancelled() or answers.exception() is not None)


def _request_of(reply: ChatReply) -> ProgramRequest:
    assert reply.turn.request is not None, "it was stored as an answer to a request"
    return reply.turn.request


def _first_of(stops: Sequence[str], text: str) -> str | None:
    """The text among `stops` that comes first in `text`; None if none does."""
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else None
