"""The MCP agent: a model that works on a query with the tools of an MCP server.

    system prompt and query -> turn -> tool calls -> results -> turn -> ... -> answer

A turn without tool calls is the answer. Calls of one turn run at the same time; a call that the
model wrote wrongly, and a tool that fails, are answered with the error, for the model to read.

Before the next turn the conversation may be rewritten (`context_strategies.py`): because the turn
only repeated others, or because the prompt would be longer than `--max_prompt_tokens`. A turn
stands between any two rewritings, and turns and tokens are limited, so that it ends; where a
rewriting does not make enough room, the record ends at once.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Sequence

from agentrl.databases.documents import Record, Rewrite, StopReason, ToolCall, TurnStatus
from agentrl.databases.tasks import Claim
from agentrl.failures import InfrastructureFailure
from agentrl.rollout.agents.answers import extract_answer
from agentrl.rollout.agents.base import SamplerResources
from agentrl.rollout.agents.context_strategies import (
    SUMMARY_REQUEST,
    TAKEN_OUT,
    ask_for_summary,
    discard_results,
    restart,
    take_out_last_turn,
)
from agentrl.rollout.agents.repetition import repeats
from agentrl.rollout.agents.tool_sampler import MadeCall, ToolSampler
from agentrl.rollout.agents.turn import Turn
from agentrl.rollout.agents.turn_status import format_error
from agentrl.rollout.chat import Entry, Message
from agentrl.rollout.tool_calls import Call, ParsedCall


class MCPSampler(ToolSampler):
    """One attempt at one task with the tools of an MCP server."""

    def __init__(self, claim: Claim, record: Record, resources: SamplerResources) -> None:
        super().__init__(claim, record, resources)
        self._head = self.opening_messages()
        self._added: Sequence[Message] = self._head  # to the prompt of the next turn
        self._rewrite: Rewrite | None = None  # of the conversation before the next turn
        self._calls_in_view: set[bytes] = set()  # keys of calls with results in the prompt
        self._last_calls: set[bytes] = set()  # keys of the last turn's calls
        self._n_repeats = 0
        self._texts: Counter[str] = Counter()  # of the turns in this context

    async def converse(self) -> Record:
        """Run the conversation until the model answers or a limit is reached."""
        await self.begin_conversation(self._head, self.resources.tools.schemas)
        reason = self.limit_reached()
        while reason is None:
            reason = await self._respond(await self.generate()) or self.limit_reached()
        self.record.stop_reason = reason
        return self.record

    async def _respond(self, turn: Turn) -> StopReason | None:
        """Make a turn's calls and prepare the next turn; returns why there is none, if so."""
        parsed = self.resources.renderer.parse_calls(turn.text, self.resources.tools.schemas)
        reason = turn.stop_reason or self.limit_reached()
        if not parsed.calls and turn.stop_reason is None:
            reason = StopReason.ANSWERED
            answer = self.resources.renderer.said(parsed.content)
            self.record.final_answer = extract_answer(answer, self.answer_schema)
        if reason is not None:  # no later turn could read the results
            await self._write(turn, _unanswered(parsed.calls), self._fault(parsed.calls))
            return reason
        made, repeated = await self._use_tools(turn, parsed.calls)
        config = self.resources.config.context
        self._texts[turn.text.strip()] += 1
        again = 0 < config.repetition_early_stop_times <= self._texts[turn.text.strip()]
        if again and not config.enable_repetition_compress:
            return StopReason.REPETITION
        if 0 < config.repeated_turns_limit <= self._n_repeats:
            return StopReason.REPETITION
        self._added = [{"role": "tool", "content": call.document.result} for call in made]
        await self.continue_conversation(turn, self._added)
        if repeated and config.remove_repeated_turns:
            note = {"role": "tool", "content": TAKEN_OUT}
            await self._go_on_from(take_out_last_turn(self.entries), Rewrite.REPETITION, [note])
        else:
            self._last_calls = {call.key for call in made}
        too_long = self.context.prompt_len > self._longest_prompt
        if again or (too_long and config.new_context != "disabled"):
            return await self._make_room()
        return None

    async def _use_tools(self, turn: Turn, calls: Sequence[Call]) -> tuple[list[MadeCall], bool]:
        """Make a turn's calls and store the turn. Returns them, and whether it repeats others."""
        began = time.monotonic()
        try:
            made = await asyncio.gather(*self._calls_of(turn, calls))
        except (asyncio.CancelledError, InfrastructureFailure):  # keep the turn and its calls
            await self._write(turn, _unanswered(calls), self._fault(calls))
            raise
        self.record.n_tool_calls += len(made)
        self.record.n_tool_errors += sum(call.document.is_error for call in made)
        keys = [call.key for call in made]
        repeated = repeats(keys, self._calls_in_view)
        self._calls_in_view.update(keys)
        await self._write(
            turn,
            [call.document for call in made],
            self._fault(calls),
            time.monotonic() - began,
            repeated,
        )
        return made, repeated

    def _calls_of(self, turn: Turn, calls: Sequence[Call]) -> list[Awaitable[MadeCall]]:
        """A turn's calls, to be made, or as they were made before a fork."""
        replayed = turn.generation.replayed
        if replayed is None or self.recorded is None:
            return [self.make_call(call) for call in calls]
        recorded = self.recorded.calls(replayed)
        return [self.repeat_call(*pair) for pair in zip(calls, recorded, strict=True)]

    async def _make_room(self) -> StopReason | None:
        """Rewrite a conversation that is too long or says the same again, by `--new_context`.

        Returns a stop reason if a limit ends the record first.
        """
        entries, results = self.entries, self._added
        if self.resources.config.context.new_context == "discard_all_tools":
            await self._go_on_from(discard_results(entries), Rewrite.DISCARD_ALL_TOOLS, results)
        else:
            question = ask_for_summary(entries)
            if question is None:  # nothing to summarise; the caller checks the prompt's length
                return None
            summary = await self._sum_up(question)
            if isinstance(summary, StopReason):
                return summary
            restarted = restart(self._head, summary, entries)
            notes = restarted[len(self._head) - 1].message
            await self._go_on_from(restarted, Rewrite.DISCARD_ALL, [notes, *results])
        # Other results are no longer in the prompt, so their calls may be repeated.
        self._calls_in_view = set(self._last_calls)
        self._texts.clear()
        return None

    async def _sum_up(self, question: Sequence[Entry]) -> str | StopReason:
        """Have the model write a summary, in a turn that is trained like any other."""
        request = {"role": "tool", "content": SUMMARY_REQUEST}
        await self._go_on_from(question, Rewrite.SUMMARY, [request])
        reason = self.limit_reached()
        if reason is not None:
            return reason
        turn = await self.generate()
        schemas = self.resources.tools.schemas
        reading = self.resources.renderer.read_turn(turn.text, "", schemas)
        fault = None
        if reading.calls or not reading.content:
            fault = "a call in the place of the summary" if reading.calls else "an empty summary"
        await self._write(turn, _unanswered(reading.calls), fault)
        return turn.stop_reason or reading.content or StopReason.MAX_PROMPT_TOKENS

    async def _go_on_from(
        self, entries: Sequence[Entry], rewrite: Rewrite, added: Sequence[Message]
    ) -> None:
        await self.rewrite_conversation(entries)
        self._rewrite, self._added = rewrite, added

    async def _write(
        self,
        turn: Turn,
        calls: Sequence[ToolCall],
        format_error: str | None,
        tools_latency_s: float = 0.0,
        repeated: bool = False,
    ) -> None:
        status = await self.write_turn(
            turn,
            self._added,
            calls,
            format_error,
            tools_latency_s,
            repeated=repeated,
            rewrite=self._rewrite,
        )
        self._n_repeats += repeated or status == TurnStatus.REPEAT_ERROR
        self._rewrite = None

    def _fault(self, calls: Sequence[Call]) -> str | None:
        """What is wrong with a turn's calls; None if nothing is."""
        return format_error(calls, self.resources.tools.schemas)

    @property
    def _longest_prompt(self) -> int:
        """The prompt length in tokens above which the conversation is rewritten."""
        config, renderer = self.resources.config, self.resources.renderer
        longest = self.limits.max_prompt_tokens
        if config.context.new_context != "discard_all":
            return longest
        # Leave room for the request for a summary.
        asked = [{"role": "user", "content": SUMMARY_REQUEST}]
        return longest - len(renderer.render_prompt(asked))


def _unanswered(calls: Sequence[Call]) -> list[ToolCall]:
    """Calls that were parsed but not made."""
    return [
        ToolCall(name=call.name, arguments=call.arguments)
        for call in calls
        if isinstance(call, ParsedCall)
    ]
