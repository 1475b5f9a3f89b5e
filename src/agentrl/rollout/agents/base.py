"""What a sampler is: the base class that agents subclass, and what all samplers of a process share.

An `AsyncSampler` drives one attempt at one task: `run()` holds the conversation, turn by turn, and
`evaluate_record()` scores it, by its task's scorer unless a subclass does otherwise. `run()` may
call `create_chat_completions`, or hold the conversation turn by turn itself. Claims, leases and
retries are the scheduler's (`scheduling/scheduler.py`).
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, cast

import orjson

from agentrl.configs import Config, ConfigError, model_folder
from agentrl.databases.arrays import pack_floats, pack_ints
from agentrl.databases.documents import (
    DispatchedSamplingTask,
    ProgramRequest,
    Record,
    Replay,
    Rewrite,
    Split,
    StopReason,
    ToolCall,
    TurnStatus,
)
from agentrl.databases.growing_tree import Ids
from agentrl.databases.records import RecordLedger, turn_id
from agentrl.databases.tasks import Claim
from agentrl.failures import InfrastructureFailure
from agentrl.inference.generation_builder import OnTokens
from agentrl.inference.pool import ServicePool
from agentrl.inference.protocol import GenerateRequest, Generation, PromptTooLong, SamplingParams
from agentrl.rollout.agents.answers import INSTRUCTIONS
from agentrl.rollout.agents.limits import LimitReached, Limits, TurnLimit
from agentrl.rollout.agents.recorded import (
    Diverged,
    ForkedAnswers,
    RecordedAnswers,
    RecordedTurn,
    asked_with,
    recorded_turns,
)
from agentrl.rollout.agents.repetition import loops
from agentrl.rollout.agents.stored_turns import restored_turns
from agentrl.rollout.agents.task_view import TaskView
from agentrl.rollout.agents.turn import Turn
from agentrl.rollout.agents.turn_status import turn_status
from agentrl.rollout.chat import (
    ChatRenderer,
    Conversation,
    Entry,
    Message,
    NextPrompt,
    ToolSchema,
    beside_loop,
    n_characters,
)
from agentrl.rollout.chat.tokens import PromptChange, TokenContext
from agentrl.rollout.groups.advantages import GREEDY_ROLLOUT
from agentrl.rollout.scorers import Scorers
from agentrl.rollout.scorers.results import as_score
from agentrl.rollout.tool_calls.calls import tool_names

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

    from agentrl.rollout.agents.completions import Completions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplerResources:
    """Resources shared by all samplers of a process. Opened by `AsyncSampler.open_resources`.

    A subclass holds further resources (`AsyncSampler.extend_resources`).
    """

    config: Config
    pool: ServicePool
    renderer: ChatRenderer
    records: RecordLedger
    scorers: Scorers


def entry_of(turn: Turn) -> Entry:
    """The turn as an entry of a conversation."""
    return Entry({"role": "assistant", "content": turn.text}, turn.generation.output_ids)


class AsyncSampler(ABC):
    """One attempt at one task.

    A subclass implements `run()`, and `extend_resources()` if its samplers share further resources.
    `self.record` is always up to date, so that a failed attempt keeps what was done.

    `resumes`: whether an attempt that follows another one takes the answers of its turns. That is
    right where the agent begins everything else again, as a program does. State of tools that went
    with an attempt is not there again.
    """

    resumes: ClassVar[bool] = False

    def __init__(self, claim: Claim, record: Record, resources: SamplerResources) -> None:
        self.claim = claim
        self.record = record
        self.resources = resources
        self.limits = Limits.of(resources.config.sampling)
        self.context = TokenContext()
        self.n_running = 0  # turns that are being sampled, and not in the context yet
        self.outage: InfrastructureFailure | None = None  # the first one of this attempt
        self.on_outage: Callable[[InfrastructureFailure], None] | None = None  # ends the attempt
        self.on_stored: Callable[[DispatchedSamplingTask], None] | None = None  # told of each turn
        self.recorded: RecordedAnswers | None = None  # answers before a service is asked
        self._diverged: Diverged | None = None  # from the rollout that is to be forked
        self._conversation: Conversation | None = None
        self._completions: Completions | None = None  # of `create_chat_completions`
        self._n_asked = 0
        self._tools: bytes | None = None  # their list, until it is stored

    @classmethod
    @asynccontextmanager
    async def open_resources(
        cls, config: Config, pool: ServicePool, records: RecordLedger
    ) -> AsyncIterator[SamplerResources]:
        """Open the resources that samplers of this class share.

        A process with several kinds of agents opens `AsyncSampler`'s resources and extends them for
        each kind. Raises `ConfigError` if the model folder lacks files or a usable chat template,
        `AgentModelsError` for an unusable `--agent_config_path`, and errors of `extend_resources`.
        """
        renderer = load_renderer(config)
        async with Scorers.of_run(config, records) as scorers:
            shared = SamplerResources(config, pool, renderer, records, scorers)
            async with cls.extend_resources(shared) as resources:
                yield resources

    @classmethod
    @asynccontextmanager
    async def extend_resources(cls, shared: SamplerResources) -> AsyncIterator[SamplerResources]:
        """Open further resources of this class, once per process. Yields them with `shared`."""
        yield shared

    @classmethod
    def check_flags(cls, config: Config) -> None:
        """Raise `ConfigError` if flags that this class needs are missing or wrong."""
        return  # most need none

    async def sample(self) -> Record:
        """Call `run()`. An uncaught `LimitReached` ends the record with the turns so far."""
        ended = False
        made: Record | None = self.record
        if self.recorded is None:
            self.recorded = await self._find_recorded()
        try:
            made = await self.run()
            ended = True
        except LimitReached as limit:
            self.record.stop_reason = limit.stop_reason
        finally:
            if self._completions is not None:
                await self._completions.finish(ended=ended)
            if self._diverged is not None:  # whatever the agent made of that
                raise self._diverged
        if isinstance(self.recorded, ForkedAnswers) and not self.recorded.reached:
            raise Diverged("the agent ends before the turn that is to be forked")
        if made is None and self._completions is not None:
            made = self.record
        return cast(Record, made)  # None is refused where it is stored

    async def _find_recorded(self) -> RecordedAnswers | None:
        """The stored turns that the attempt does not sample again; None if there are none."""
        claim, records = self.claim, self.resources.records
        earlier: list[list[DispatchedSamplingTask]] = []
        if self.resumes and claim.attempt > 0:
            oldest = self.resources.config.staleness_bound
            earlier = await records.earlier_turns(claim, oldest)
        fork, forked = claim.fork, []
        if fork is not None:
            forked = (await records.turns([fork.record]))[fork.record]
        elif not earlier:
            return None

        def read() -> RecordedAnswers:
            attempts = [recorded_turns(turns) for turns in earlier]
            if fork is None:
                return RecordedAnswers(attempts)
            return ForkedAnswers(recorded_turns(forked), fork.turn, attempts)

        return await asyncio.to_thread(read)  # heartbeats would wait for long records

    @abstractmethod
    async def run(self) -> Record | None:
        """Run the conversation.

        Returns the Record with turns, counts, stop reason and answer; or None if all turns came
        from `create_chat_completions`, which keeps the Record.
        """

    async def create_chat_completions(
        self,
        messages: Sequence[Any],
        model: str | None = None,
        tools: Sequence[ToolSchema] | None = None,
        **options: Any,
    ) -> "ChatCompletion":
        """An answer of the model to these messages, as the openai client gives it.

        `messages`: OpenAI's, of which those that show earlier answers stand for their tokens.
        `tools`: schemas offered to the model. `options`: `max_tokens` bounds the answer; others
        have no effect, which is logged. Raises `LimitReached` at the record's limits.
        """
        if self._completions is None:
            # Imported here: it builds on this module.
            from agentrl.rollout.agents.completions import Completions

            self._completions = Completions(self)
        return await self._completions.create(messages, tools, {**options, "model": model})

    async def score(self, record: Record) -> Record:
        """Call `evaluate_record()`. A number that it returns becomes the Record's score."""
        said = await self.evaluate_record(record)
        if isinstance(said, Record) or said is None:
            return said  # None is refused where it is stored
        name = record.agent_name or type(self).__name__
        made = as_score(f"{name}.evaluate_record", said)
        scores = {**record.scores, name: made.value}
        return record.model_copy(update={"score": made.value, "scores": scores})

    async def evaluate_record(self, record: Record) -> Record | float:
        """Score a Record whose conversation is over.

        Returns the Record with `score` and `scores`, or a number, which becomes its score. The
        default uses the task's scorer. An override may use `record`, its turns
        (`self.resources.records.turns([record.id])`), `self.task` and `self.resources`, but
        not state that `run()` left on `self`: a Record may be scored again by a new sampler in
        another process, without `run()`. `run()` passes data for scoring in `record.meta_infos`,
        `record.scores` (numbers) and `record.explanations` (texts), which are stored before
        scoring.

        An exception fails the scoring, not the trajectory. The Record is scored again after a
        pause, and quarantined after `--max_scoring_failures` failures. An `InfrastructureFailure`
        does not count as one.
        """
        return await self.resources.scorers.score(self.claim.task, record)

    @property
    def task(self) -> TaskView:
        """The task, with the further fields of its line as attributes."""
        return TaskView.of(self.claim.task, type(self).__module__)

    @property
    def answer_schema(self) -> str | None:
        """The schema by which the answer is taken from the last turn."""
        return self.claim.task.answer_schema or self.resources.config.agent.answer_schema

    def meet_outage(self, failure: InfrastructureFailure) -> None:
        """Hand the attempt back because a dependency is unreachable.

        Nothing of the attempt is trained, even if the agent catches the error.
        """
        if self.outage is None:
            self.outage = failure
            if self.on_outage is not None:
                self.on_outage(failure)

    def opening_messages(self) -> list[Message]:
        """The first messages of the conversation: the task's messages, or its query.

        The task's `system_prompt`, or else `--system_prompt`, comes first, unless the messages
        begin with a system message.
        """
        task = self.claim.task
        messages: list[Message] = list(task.messages or [])
        if not messages:
            messages = [{"role": "user", "content": task.query}]
        agent = self.resources.config.agent
        system = agent.system_prompt if task.system_prompt is None else task.system_prompt
        if system is None and agent.answer_schema is not None:
            system = INSTRUCTIONS[self.answer_schema or agent.answer_schema]
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return messages

    async def begin_conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None
    ) -> PromptChange | None:
        """Begin a segment with these messages. Returns the change; None before the first turn."""
        self._conversation = await beside_loop(
            n_characters(messages), Conversation, self.resources.renderer, messages, tools
        )
        self.note_tools(tools or ())
        prompt_change = self.context.begin_segment(self._conversation.prompt_ids)
        self._count_continuations()
        return prompt_change

    def note_tools(self, tools: Sequence[ToolSchema]) -> None:
        """Record the tools that a prompt offers. Their list is stored with the next turn."""
        offered = self.record.tools_offered
        offered += sorted(tool_names(tools).difference(offered))
        if tools and self.record.tool_list is None:
            self._tools = orjson.dumps(list(tools))  # in their order, which prompts have
            self.record.tool_list = blake2b(self._tools, digest_size=16).hexdigest()

    async def keep_tools(self) -> None:
        """Store the list of tools that was noted."""
        if self.record.tool_list is not None and self._tools is not None:
            await self.resources.records.keep_tools(self.record.tool_list, self._tools.decode())
            self._tools = None

    @property
    def n_turns(self) -> int:
        """Number of generated turns, all of which are to be stored."""
        return self.context.n_turns

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The conversation's messages in order; generated ones have their token ids."""
        assert self._conversation is not None, "the conversation has not begun"
        return self._conversation.entries

    async def continue_conversation(self, turn: Turn, added: Sequence[Message]) -> PromptChange:
        """Append a generated turn and the tool or user messages that follow it.

        If the chat template does not extend the sampled tokens, a new segment begins.
        """
        conversation = self._conversation
        assert conversation is not None, "the conversation has not begun"
        size = conversation.n_characters + n_characters(added)
        output_ids = turn.generation.output_ids
        return self._go_on(await beside_loop(size, conversation.extend, output_ids, added))

    async def rewrite_conversation(self, entries: Sequence[Entry]) -> PromptChange:
        """Continue in a new segment from other entries: some of `self.entries`, and new ones.

        Generated turns among them keep their sampled ids. May follow `generate` or
        `continue_conversation`. A turn that was not continued is not in `self.entries`; pass its
        `entry_of` to keep it.
        """
        conversation = self._conversation
        assert conversation is not None, "the conversation has not begun"
        size = conversation.n_characters
        return self._go_on(await beside_loop(size, conversation.rewrite, entries))

    def _go_on(self, next_prompt: NextPrompt) -> PromptChange:
        if next_prompt.extends:
            prompt_change = self.context.observe(
                next_prompt.ids, next_prompt.n_separator, next_prompt.restyled
            )
        else:
            begun = self.context.begin_segment(
                next_prompt.ids, next_prompt.drift, next_prompt.n_rewritten
            )
            assert begun is not None, "a turn came before"
            prompt_change = begun
        self._count_continuations()
        return prompt_change

    def _count_continuations(self) -> None:
        self.record.tokens = self.context.counts
        self.record.n_segments = len(self.context.segments)
        self.record.n_continuations = self.context.n_continuations
        self.record.n_drifts = self.context.n_drifts

    def limit_reached(self) -> StopReason | None:
        """Why no further turn may be generated; None if one may."""
        context = self.context
        return self.limits.reached(context.n_turns, context.prompt_len)

    async def generate(self) -> Turn:
        """Generate a turn from the tokens so far and append it. Raises the errors of `ask`."""
        left = self.limits.tokens_left(self.context.prompt_len)
        return self.add_turn(*await self.ask(self.context.ids, left))

    async def ask(
        self,
        prompt_ids: Ids,
        left: int,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        on_tokens: OnTokens | None = None,
        json_schema: str | None = None,
    ) -> tuple[Generation, StopReason | None]:
        """Generate from a prompt. No turn is added, so calls may run concurrently.

        A request that equals a recorded one (`recorded`) gets that answer, and no service is asked.
        `left`: tokens that the context has room for. `max_new_tokens`: a further limit besides
        `--max_new_tokens`. `stop`: texts that end the answer. `on_tokens`: called with all its ids
        so far, as they come. `json_schema`: of the answer, whose logprobs are then not those of the
        policy. Returns the answer and the limit that truncated it, if any. Raises `LimitReached` if
        the service's context leaves no room for an answer, `InferenceError` if no service answers,
        and RuntimeError if the answer is empty or continues after a stop token. After an outage,
        every call raises it again.
        """
        if self.outage is not None:
            await asyncio.sleep(0)  # lets an agent that retries in a loop be cancelled
            raise self.outage
        limit = self.limits.of_turn(left, max_new_tokens)
        params = SamplingParams(
            **cast(dict[str, Any], self._sampling_params()),
            max_new_tokens=limit.max_new_tokens,
            stop_token_ids=self.resources.renderer.stop_token_ids,
            stop=tuple(stop),
            json_schema=json_schema,
        )
        request = GenerateRequest(f"{self.record.id}-{self._n_asked}", prompt_ids, params)
        self._n_asked += 1
        recorded = self.take_recorded(prompt_ids, asked_with(params))
        if recorded is not None and recorded.generation is not None:
            answer = replace(recorded.generation, params=params, answered_at=datetime.now(UTC))
            return answer, self._cut_by(answer, limit)
        pool = self.resources.pool
        try:
            generation = await pool.generate(request, record_id=self.record.id, on_tokens=on_tokens)
        except PromptTooLong as error:
            raise LimitReached(StopReason.MAX_PROMPT_TOKENS) from error
        except InfrastructureFailure as outage:
            outage.probe = pool.check
            self.meet_outage(outage)
            raise
        if not generation.output_ids:
            raise RuntimeError(
                f"{generation.service} ended turn {self.context.n_turns} of {self.record.id} "
                f"without a token ({generation.finish_reason})"
            )
        if not set(params.stop_token_ids).isdisjoint(generation.output_ids[:-1]):
            raise RuntimeError(
                f"{generation.service} went on generating after the end of turn "
                f"{self.context.n_turns} of {self.record.id}"
            )
        return generation, self._cut_by(generation, limit)

    def take_recorded(self, prompt_ids: Ids, params: Mapping[str, Any]) -> RecordedTurn | None:
        """The recorded turn of a request, if there is one. Notes the first request without.

        Of a request to another model `prompt_ids` is empty.
        """
        if self.recorded is None:
            return None
        try:
            answer = self.recorded.take(prompt_ids, params)
        except Diverged as diverged:
            self._diverged = diverged
            raise
        if answer is None and next(self.recorded.left(), None) is not None:
            replay = self.record.replay = self.record.replay or Replay()
            if replay.diverged is None:
                replay.diverged = self.context.n_turns
                log.info("%s: diverged at turn %d", self.record.id, replay.diverged)
        return answer

    @staticmethod
    def _cut_by(generation: Generation, limit: TurnLimit) -> StopReason | None:
        """The limit that truncated an answer; None if none did."""
        if generation.finish_reason != "length":
            return None
        if len(generation.output_ids) < limit.max_new_tokens:  # the service's context is full
            return StopReason.MAX_PROMPT_TOKENS
        return limit.stop_reason

    def _sampling_params(self) -> dict[str, float]:
        """The run's sampling parameters; greedy for a group's baseline (`--advantage remax`)."""
        config, record = self.resources.config, self.record
        if (config.reward.estimator, record.split, record.rollout) == (
            "remax", Split.TRAIN, GREEDY_ROLLOUT,
        ):  # fmt: skip
            return {**config.sampling_params, "temperature": 0.0}
        return config.sampling_params

    def add_answer(
        self,
        prompt_ids: Ids,
        generation: Generation,
        stop_reason: StopReason | None,
        next_prompt: NextPrompt | None,
    ) -> Turn:
        """Add the answer to any prompt as a turn; the prompt need not extend the tokens so far.

        `next_prompt`: how a conversation led to the prompt, if one did.
        """
        if next_prompt is None:
            self.context.go_on(prompt_ids)
        else:
            self.context.go_on(
                prompt_ids,
                n_separator=next_prompt.n_separator,
                restyled=next_prompt.restyled,
                drift=next_prompt.drift,
                n_rewritten=next_prompt.n_rewritten,
            )
        self._count_continuations()
        return self.add_turn(generation, stop_reason)

    def add_turn(self, generation: Generation, stop_reason: StopReason | None) -> Turn:
        """Append an answer to its prompt, as a turn of the record."""
        if generation.replayed is not None:
            self.count_replayed(len(generation.output_ids))
        tokens = self.context.add_turn(
            generation.output_ids, generation.output_logprobs, generation.versions
        )
        self.record.n_turns = self.context.n_turns
        self.record.tokens = self.context.counts
        self.record.versions = self.context.versions
        text = self.resources.renderer.split_turn(generation.output_ids)[0]
        return Turn(generation, text, stop_reason, tokens)

    def count_replayed(self, tokens: int) -> None:
        """Count a turn of so many tokens that was not sampled."""
        replay = self.record.replay = self.record.replay or Replay()
        replay.turns += 1
        replay.tokens += tokens

    async def write_turn(
        self,
        turn: Turn,
        messages: Sequence[Message],
        tool_calls: Sequence[ToolCall] = (),
        format_error: str | None = None,
        tools_latency_s: float = 0.0,
        *,
        repeated: bool = False,
        rewrite: Rewrite | None = None,
        continues: tuple[int, int] | None = None,
        request: ProgramRequest | None = None,
        agent: str | None = None,
        trained: bool = True,
    ) -> TurnStatus:
        """Store a turn after its tools have answered. Returns its status.

        `messages`: added before the turn. `format_error`: what is wrong with its calls. `repeated`:
        whether it repeats earlier turns. `rewrite`: how the conversation was rewritten before it.
        `continues`: turn and number of the messages before the added ones. `request`: of a program.
        `agent`: which of a program's agents it is of. `trained`: whether its tokens may be trained.
        """
        made, tokens = turn.generation, turn.tokens
        ended = made.finish_reason != "length"
        status = turn_status(
            cut_off=not ended,
            looped=loops(made.output_ids[:-1] if ended else made.output_ids),
            malformed=format_error is not None,
            repeated=repeated,
            failed=any(call.is_error for call in tool_calls),
        )
        document = DispatchedSamplingTask(
            id=turn_id(self.record.id, tokens.turn),
            record_id=self.record.id,
            turn=tokens.turn,
            agent=agent,
            trained=trained,
            status=status,
            segment=tokens.segment,
            parent=turn_id(self.record.id, tokens.branch.turn) if tokens.branch else None,
            shared_len=tokens.branch.shared_len if tokens.branch else 0,
            rewrite=rewrite,
            service=made.service,
            messages=list(messages),
            continues=continues[0] if continues else None,
            n_continued=continues[1] if continues else 0,
            request=request,
            drift=tokens.prompt_change.drift if tokens.prompt_change else None,
            prompt_delta_ids=pack_ints(tokens.prompt_delta),
            prompt_len=tokens.prompt_len,
            output_ids=pack_ints(made.output_ids),
            output_logprobs=pack_floats(made.output_logprobs),
            output_text=turn.text,
            tool_calls=list(tool_calls),
            format_error=format_error,
            finish_reason=made.finish_reason,
            params=None if made.params is None else asked_with(made.params),
            replayed=made.replayed,
            versions=list(made.versions),
            cached_tokens=made.cached_tokens,
            answered_at=made.answered_at,
            generate_latency_s=made.latency_s,
            tools_latency_s=tools_latency_s,
            created_at=datetime.now(UTC),
        )
        await self.store_turn(document)
        return status

    async def store_turn(self, document: DispatchedSamplingTask) -> None:
        """Store a turn, and count it in the Record."""
        await self.keep_tools()
        await self.resources.records.add_turn(document)
        self._count_stored(document)

    def _count_stored(self, document: DispatchedSamplingTask) -> None:
        self.record.turns.append(document.id)
        counts = self.record.turn_statuses
        counts[document.status] = counts.get(document.status, 0) + 1
        if self.on_stored is not None:
            self.on_stored(document)

    def go_on_after(self, turns: Sequence[DispatchedSamplingTask]) -> list[Turn]:
        """Take up an attempt where its stored turns end; returns them as they were generated.

        Raises ValueError if they do not fit together.
        """
        made, record = restored_turns(turns, self.resources.renderer), self.record
        self.context = made.context
        self._count_continuations()
        record.n_turns, record.versions = self.context.n_turns, self.context.versions
        record.turns, record.turn_statuses = [], {}
        for document in turns:
            self._count_stored(document)
        replayed = [turn.generation for turn in made.turns if turn.generation.replayed is not None]
        if replayed:
            n_tokens = sum(len(generation.output_ids) for generation in replayed)
            record.replay = Replay(turns=len(replayed), tokens=n_tokens)
        record.n_tool_calls = sum(len(document.tool_calls) for document in turns)
        # Other requests than those of the process before, which may still be running.
        self._n_asked = int(time.time())
        return made.turns


def load_renderer(config: Config) -> ChatRenderer:
    """The renderer of the run's model. Raises `ConfigError` if the model folder is unusable."""
    if config.model.model_name_or_path is None:
        raise ConfigError("--model_name_or_path is needed: the folder of the model")
    folder = model_folder(config.model.model_name_or_path, "--model_name_or_path")
    try:
        return ChatRenderer.load(
            folder, config.chat_template_options, config.agent.tool_call_parser
        )
    except ValueError as error:
        raise ConfigError(f"--model_name_or_path: {error}") from None
