"""A session: what the program of one attempt asks the model, and the reward that it reports.

Every answer is a turn of the attempt's Record, which is stored before the answer ends: only the
words of a stream leave before. A request that a client repeats, because the answer was lost on the
way, gets the same answer again. What a session knows follows from its stored turns: after a crash
it goes on from them.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from agentrl.databases.documents import (
    DispatchedSamplingTask,
    ProgramRequest,
    Split,
    StopReason,
    ToolCall,
)
from agentrl.gateway.agents_of_program import NamingError, ProgramAgents
from agentrl.gateway.answering import Answering
from agentrl.gateway.exchange import BadRequest, Call, ChatAnswer, ChatRequest, spoken_message
from agentrl.gateway.other_model import answer_of, ask_other
from agentrl.gateway.repeated_requests import Given, Repetitions, StoredAnswer
from agentrl.gateway.reported import Reported
from agentrl.inference.generation_builder import OnTokens
from agentrl.inference.protocol import RequestRejected
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.agents.limits import LimitReached
from agentrl.rollout.agents.llm import ChatModel, ChatReply
from agentrl.rollout.agents.shown_answers import ShownAnswer, ShownAnswers, readable_calls
from agentrl.rollout.agents.stored_turns import conversations_of
from agentrl.rollout.chat import Message, ToolSchema
from agentrl.rollout.chat.said import TurnReader
from agentrl.rollout.llm.endpoint import ChatEndpoint

T = TypeVar("T")
log = logging.getLogger(__name__)

_FINISHED = "program_finished"  # key in its Record's `meta_infos`: what `finish` was told


class SessionOver(Exception):
    """The attempt has ended: nothing more is answered."""


class RunOver(Exception):
    """The run is finished: there are no more tasks."""


class Session:
    """The conversations of one attempt.

    `id`: the Record's. `key`: what clients show. `last`: the latest answer of the model. `limit`:
    the limit of the Record that refused a request, if one did. `answer`: the final answer, if the
    program gave one. `fault`: an error of the user's own code, which fails the attempt. `error`:
    why the program failed, if it says so. `heard_at`: when it last asked something (monotonic).
    """

    def __init__(self, sampler: AsyncSampler, agents: ProgramAgents, key: str) -> None:
        self.id = sampler.record.id
        self.key = key
        self.last: ChatAnswer | None = None
        self.limit: StopReason | None = None
        self.answer: str | None = None
        self.fault: NamingError | None = None
        self.error: str | None = None
        self.heard_at = time.monotonic()
        self.finished = asyncio.Event()  # the program said that it is done
        self._sampler = sampler
        self._agents = agents
        self._said_to_others: list[Message] = []  # to other models than the run's
        self._llm = ChatModel(sampler)
        self._shown = ShownAnswers()
        self._n_asking = 0
        self._turns: dict[int, int] = {}  # the first turn of each request
        self._conversations: dict[int, list[Message]] = {}  # by the request that they end with
        self._requests = Repetitions()
        self._in_order = asyncio.Lock()  # turns are stored in the order of their numbers
        self._answering: set[asyncio.Task[list[ChatAnswer]]] = set()
        self._storing: set[asyncio.Task[Any]] = set()
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
        replies = iter(self._llm.go_on_after(turns))
        for turn, messages in zip(turns, conversations_of(turns), strict=True):
            known: StoredAnswer = turn
            if turn.output_ids:
                known = next(replies)
                stop = turn.request.stopped_by if turn.request else None
                asked = ChatRequest([], tools, stop=(stop,) if stop else ())
                self._remember(self._read(known, asked), known, messages[:-1])
            else:
                self.last = answer_of(turn)
                self._said_to_others += turn.messages
            if turn.request is not None:
                self._requests.restore(turn.request, known)
                self._turns.setdefault(turn.request.number, turn.turn)

    def ask(self, request: ChatRequest, digest: str, *, repeated: bool) -> Given:
        """Begin to answer a request, or find the answers that are being made, or were.

        `digest`: equal for equal requests. `repeated`: the client says that it asked before. A
        client that hangs up stops nothing, because it may ask again. Raises `SessionOver`; the
        answers raise `LimitReached`, `TemplateRefusal`, and the errors of `AsyncSampler.ask`.
        """
        self.check_open()
        asked = self._requests.find(digest, repeated=repeated)
        if asked.answering is None:
            if asked.stored:
                log.info("%s: request %d is answered from the ledger", self.id, asked.number)
            asked.answering = Answering(asked.number, request.n)
            work = self._answer(request, asked.answering, digest, asked.stored)
            task = asyncio.create_task(work, name=f"answer in {self.id}")
            asked.answering.started(task)
            task.add_done_callback(self._answered)
            self._answering.add(task)
        return Given.of(asked, asked.answering)

    def delivered(self, given: Given, *, whole: bool) -> None:
        """The answer to a request has left for the client. `whole`: and arrived, as it seems.

        If it has not, it is for the next one who asks the same, also if it is still being made.
        """
        given.over(whole=whole)
        if not whole or not given.answering.made.done() or given.answering.failed:
            return
        turns = [answer.turn for answer in given.answering.result()]
        records = self._sampler.resources.records
        noting = asyncio.create_task(records.delivered(self.id, turns), name=f"note in {self.id}")
        self._storing.add(noting)
        noting.add_done_callback(self._noted)

    def check_open(self) -> None:
        """Raise `SessionOver` if the attempt has ended, or its program has said that it is done."""
        if self._over:
            raise SessionOver(f"the attempt {self.id} has ended")
        if self.finished.is_set():
            raise SessionOver(f"the attempt {self.id} has ended: its program said that it is done")

    def conversation(self, request: int) -> list[Message] | None:
        """The messages up to the answer to a request; None without it."""
        return self._conversations.get(request)

    def turn_of(self, request: int) -> int | None:
        """The first turn that answers a request; None without one."""
        return self._turns.get(request)

    def agent_of(self, request: ChatRequest, header: str | None) -> str:
        """The agent that asks. Raises `BadRequest`; and `NamingError`, which ends the attempt."""
        try:
            return self._agents.name(header, request)
        except NamingError as error:
            self.fault = error
            self.finished.set()
            raise

    def count_tokens(self, request: ChatRequest) -> int:
        """The number of tokens of the request's prompt."""
        messages = self._shown.read(request.messages).messages
        return len(self._sampler.resources.renderer.render_prompt(messages, request.tools))

    def set_reward(
        self,
        reward: object,
        explanation: object = None,
        agent: object = None,
        further: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Take the reward of the attempt, or of one agent, and further ones by name, as of turns.

        The last ones count. Raises `BadRequest`, which leaves all as it was, and `SessionOver`; not
        for what was told already, since a client repeats what was not answered.
        """
        told = Reported.of(reward, explanation, agent, further)
        if self.finished.is_set() and not self._over and told.is_in(self._sampler.record):
            return
        self.check_open()
        told.put_in(self._sampler.record)

    async def keep(self) -> None:
        """Store the rewards so far."""
        await self._sampler.resources.records.note(self._sampler.record)

    def fail(self, error: str) -> None:
        """The program failed, and the attempt with it. Raises `SessionOver`."""
        if error != self.error:
            self.check_open()
        self.error = error
        self.finished.set()

    async def finish(self, answer: str | None = None) -> None:
        """The program is done; this is stored. `answer`: its final answer. Raises `SessionOver`."""
        told = {"answer": answer}
        meta_infos = self._sampler.record.meta_infos
        if self.finished.is_set() and not self._over and meta_infos.get(_FINISHED) == told:
            return  # the same again
        self.check_open()
        meta_infos[_FINISHED] = told
        await self.keep()
        self.answer = answer
        self.finished.set()

    async def close(self) -> None:
        """End the session: answers that are being stored are stored, others are not made."""
        self._over = True
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        self._sampler.resources.records.deliver_now()
        await asyncio.gather(*self._storing, return_exceptions=True)
        await self._llm.finish()

    async def _answer(
        self,
        request: ChatRequest,
        answering: Answering,
        digest: str,
        known: Mapping[int, StoredAnswer],
    ) -> list[ChatAnswer]:
        """`known`: answers that are stored, by their choice."""
        other = self._agents.others.get(request.agent)
        messages = list(request.messages)
        if other is None:
            messages = self._shown.read(request.messages).messages

        async def one(index: int) -> ChatAnswer:
            if (stored := known.get(index)) is not None:
                if isinstance(stored, DispatchedSamplingTask):
                    return answer_of(stored)
                return self._read(stored, request)
            asked = ProgramRequest(number=answering.number, choice=index, digest=digest)
            if other is not None:
                return await self._answer_of_other(request, other, asked)
            return await self._one_answer(request, messages, answering, asked)

        try:
            return await asyncio.gather(*map(one, range(request.n)))
        except LimitReached as reached:
            self.limit = reached.stop_reason
            raise

    async def _one_answer(
        self,
        request: ChatRequest,
        messages: Sequence[Message],
        answering: Answering,
        asked: ProgramRequest,
    ) -> ChatAnswer:
        def watch(prompt_ids: Sequence[int]) -> OnTokens:
            answering.prompt_tokens = len(prompt_ids)
            reader = self._reader(request, thinking=renderer.begins_thought(prompt_ids))
            ends = renderer.stop_token_ids

            def tell(ids: Sequence[int]) -> None:
                made = ids[:-1] if ids[-1] in ends else ids
                answering.tell(asked.choice, reader.so_far(renderer.codec.decode_so_far(made)))

            return tell

        renderer = self._sampler.resources.renderer
        # One in a schema may begin anew at another service, and is not of the policy.
        schema = request.json_schema
        try:
            reply = await self._llm.chat(
                messages, request.tools, request.max_new_tokens, stop=request.stop,
                agent=request.agent,
                trained=schema is None and self._agents.is_trained(request.agent),
                watch=watch if request.streamed and schema is None else None, json_schema=schema,
            )  # fmt: skip
        except RequestRejected as refusal:
            if schema is None:
                raise
            raise BadRequest(f"an answer in a JSON schema: {refusal}") from None
        return await self._stored(self._keep(reply, request, messages, asked))

    async def _answer_of_other(
        self, request: ChatRequest, other: ChatEndpoint, asked: ProgramRequest
    ) -> ChatAnswer:
        answer, turn = await ask_other(self._sampler, other, request, self._said_to_others)
        self._said_to_others += turn.messages
        self._conversations[asked.number] = [*request.messages, spoken_message(answer)]
        self._turns.setdefault(asked.number, answer.turn)

        async def store() -> None:
            async with self._in_order:
                await self._sampler.store_turn(turn.model_copy(update={"request": asked}))

        await self._stored(store())
        return answer

    async def _stored(self, work: Coroutine[Any, Any, T]) -> T:
        """Do what stores a turn of the record: also if the session ends now."""
        storing = asyncio.create_task(work, name=f"turn of {self.id}")
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
        request = reply.turn.request
        if request is not None:
            self._turns.setdefault(request.number, answer.turn)
            self._conversations[request.number] = [*messages, shown]
        self.last = answer

    def _read(self, reply: ChatReply, request: ChatRequest) -> ChatAnswer:
        """The answer that the client gets."""
        renderer, made = self._sampler.resources.renderer, reply.turn.generated.generation
        number = reply.turn.generated.tokens.turn
        calls = tuple(
            Call(f"call_{number}_{place}", call.name, call.arguments)
            for place, call in enumerate(readable_calls(reply))
        )
        # Calls that cannot be read stay in the text.
        reader = self._reader(request, thinking=reply.thinking)
        said = reader.whole(reply.text, with_calls=bool(calls))
        content = said.text
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
            thought=said.thought,
            calls=calls,
            stopped_by=stopped_by,
            cut_off=reply.stop_reason is not None,
            prompt_tokens=made.prompt_tokens,
            cached_tokens=made.cached_tokens,
            completion_tokens=len(made.output_ids),
            tokens=tokens,
            turn=number,
        )

    def _reader(self, request: ChatRequest, *, thinking: bool) -> TurnReader:
        renderer = self._sampler.resources.renderer
        # A schema is that of all tokens, so that there is no thought before it.
        thinking = thinking and request.json_schema is None
        return TurnReader(renderer, request.tools, request.stop, thinking=thinking)

    def _noted(self, task: "asyncio.Task[Any]") -> None:
        self._storing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("a delivery in %s is not noted: %s", self.id, error)

    def _answered(self, task: "asyncio.Task[list[ChatAnswer]]") -> None:
        self._answering.discard(task)
        if not task.cancelled():
            task.exception()  # the client may have hung up


def _first_of(stops: Sequence[str], text: str) -> str | None:
    """The text among `stops` that comes first in `text`; None if none does."""
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else None
