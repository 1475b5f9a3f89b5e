"""A session: what the program of one attempt asks the model, and the reward that it reports.

Every answer is a turn of the attempt's Record, which is stored before the answer leaves. A request
that a client repeats, because the answer was lost on the way, gets the same answer again.
"""

import asyncio
import secrets
from collections.abc import Coroutine, Sequence
from copy import deepcopy
from typing import Any, TypeVar

from agentrl.databases.documents import StopReason, ToolCall
from agentrl.gateway.agents_of_program import NamingError, ProgramAgents
from agentrl.gateway.answering import Answering
from agentrl.gateway.exchange import BadRequest, Call, ChatAnswer, ChatRequest, spoken_message
from agentrl.gateway.other_model import ask_other
from agentrl.inference.generation_builder import OnTokens
from agentrl.inference.protocol import RequestRejected
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.agents.limits import LimitReached
from agentrl.rollout.agents.llm import ChatModel, ChatReply
from agentrl.rollout.agents.shown_answers import ShownAnswer, ShownAnswers, readable_calls
from agentrl.rollout.chat import Message
from agentrl.rollout.chat.said import TurnReader
from agentrl.rollout.llm.endpoint import ChatEndpoint

T = TypeVar("T")

REWARD = "reward"  # key of the reported reward in its Record's `scores`


class SessionOver(Exception):
    """The attempt has ended: nothing more is answered."""


class Session:
    """The conversations of one attempt.

    `id`: the Record's. `key`: what clients show. `last`: the latest answer of the model. `limit`:
    the limit of the Record that refused a request, if one did. `answer`: the final answer, if the
    program gave one. `fault`: an error of the user's own code, which fails the attempt.
    """

    def __init__(self, sampler: AsyncSampler, agents: ProgramAgents) -> None:
        self.id = sampler.record.id
        self.key = secrets.token_hex(16)
        self.last: ChatAnswer | None = None
        self.limit: StopReason | None = None
        self.answer: str | None = None
        self.fault: NamingError | None = None
        self.finished = asyncio.Event()  # the program said that it is done
        self.conversations: dict[str, Sequence[Message]] = {}  # by id of the answer that ends them
        self._sampler = sampler
        self._agents = agents
        self._said_to_others: list[Message] = []  # to other models than the run's
        self._llm = ChatModel(sampler)
        self._shown = ShownAnswers()
        self._asked: dict[str, Answering] = {}  # by digest of the request
        self._answering: set[asyncio.Task[list[ChatAnswer]]] = set()
        self._storing: set[asyncio.Task[Any]] = set()
        self._over = False

    @property
    def task_fields(self) -> dict[str, Any]:
        """The task of the attempt, as its line in the task file."""
        task = self._sampler.claim.task
        given: dict[str, Any] = {"id": task.task_id, "query": task.query, "answer": task.answer}
        if task.messages:
            given["messages"] = task.messages
        return deepcopy({**task.fields, **given})

    def ask(self, request: ChatRequest, digest: str, *, repeated: bool) -> Answering:
        """Begin to answer a request, or find the answers that are being made, or were.

        `digest`: equal for equal requests. `repeated`: the client says that it asked before. A
        client that hangs up stops nothing, because it may ask again. Raises `SessionOver`; the
        answers raise `LimitReached`, `TemplateRefusal`, and the errors of `AsyncSampler.ask`.
        """
        if self._over:
            raise SessionOver(f"the attempt {self.id} has ended")
        earlier = self._asked.get(digest) if repeated else None
        if earlier is not None and not _failed(earlier.made):
            return earlier
        answering = Answering(request.n)
        task = asyncio.create_task(self._answer(request, answering), name=f"answer in {self.id}")
        answering.started(task)
        task.add_done_callback(self._answered)
        self._answering.add(task)
        self._asked[digest] = answering
        return answering

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
        self, reward: float, explanation: str | None = None, agent: str | None = None
    ) -> None:
        """Take the reward of the attempt, or of one agent; the last one counts.

        Raises `SessionOver`.
        """
        if self._over:
            raise SessionOver(f"the attempt {self.id} has ended")
        record = self._sampler.record
        if agent is None:
            record.scores[REWARD] = reward
        else:
            record.agent_rewards[agent] = reward
        if explanation:
            record.explanations[REWARD if agent is None else f"{REWARD} of {agent}"] = explanation

    async def close(self) -> None:
        """End the session: answers that are being stored are stored, others are not made."""
        self._over = True
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        await asyncio.gather(*self._storing, return_exceptions=True)
        await self._llm.finish()

    async def _answer(self, request: ChatRequest, answering: Answering) -> list[ChatAnswer]:
        other = self._agents.others.get(request.agent)
        if other is not None:
            answers = [self._answer_of_other(request, other) for _ in range(request.n)]
        else:
            messages = self._shown.read(request.messages).messages
            answers = [
                self._one_answer(request, messages, answering, index) for index in range(request.n)
            ]
        try:
            return await asyncio.gather(*answers)
        except LimitReached as reached:
            self.limit = reached.stop_reason
            raise

    async def _one_answer(
        self, request: ChatRequest, messages: Sequence[Message], answering: Answering, index: int
    ) -> ChatAnswer:
        def watch(prompt_ids: Sequence[int]) -> OnTokens:
            answering.prompt_tokens = len(prompt_ids)
            reader = self._reader(request, thinking=renderer.begins_thought(prompt_ids))
            ends = renderer.stop_token_ids

            def tell(ids: Sequence[int]) -> None:
                made = ids[:-1] if ids[-1] in ends else ids
                answering.tell(index, reader.so_far(renderer.codec.decode_so_far(made)))

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
        return await self._stored(self._keep(reply, request, messages))

    async def _answer_of_other(self, request: ChatRequest, other: ChatEndpoint) -> ChatAnswer:
        answer, turn = await ask_other(self._sampler, other, request, self._said_to_others)
        self._said_to_others += turn.messages
        await self._stored(self._sampler.store_turn(turn))
        return answer

    async def _stored(self, work: Coroutine[Any, Any, T]) -> T:
        """Do what stores a turn of the record: also if the session ends now."""
        storing = asyncio.create_task(work, name=f"turn of {self.id}")
        self._storing.add(storing)
        storing.add_done_callback(self._storing.discard)
        return await asyncio.shield(storing)

    async def _keep(
        self, reply: ChatReply, request: ChatRequest, messages: Sequence[Message]
    ) -> ChatAnswer:
        answer = self._read(reply, request)
        shown = spoken_message(answer)
        # Some clients put back the text that ended an answer.
        whole = {**shown, "content": answer.content + (answer.stopped_by or "")}
        self._shown.add(ShownAnswer(messages, shown, reply), whole)
        for call in answer.calls:
            made = ToolCall(name=call.name, arguments=dict(call.arguments))
            self._llm.keep_call(made, reply.turn)
        self._sampler.record.n_tool_calls += len(answer.calls)
        await self._llm.store(reply)
        self.last = answer
        return answer

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
            tokens = list(zip(texts, map(float, made.output_logprobs), strict=True))
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
        )

    def _reader(self, request: ChatRequest, *, thinking: bool) -> TurnReader:
        renderer = self._sampler.resources.renderer
        # A schema is that of all tokens, so that there is no thought before it.
        thinking = thinking and request.json_schema is None
        return TurnReader(renderer, request.tools, request.stop, thinking=thinking)

    def _answered(self, task: "asyncio.Task[list[ChatAnswer]]") -> None:
        self._answering.discard(task)
        if not task.cancelled():
            task.exception()  # the client may have hung up


def _failed(made: "asyncio.Task[Any]") -> bool:
    return made.done() and (made.cancelled() or made.exception() is not None)


def _first_of(stops: Sequence[str], text: str) -> str | None:
    """The text among `stops` that comes first in `text`; None if none does."""
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else None
