"""The scorers of a process, opened: from finished Records to their scores.

A scorer that raises leaves its error on the Record; no score is made up in its place.
"""

from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

from agentrl.configs import Config
from agentrl.databases.documents import GroupScore, Record, Task
from agentrl.databases.records import RecordLedger
from agentrl.databases.scorer_notation import parse_scorer
from agentrl.failures import InfrastructureFailure
from agentrl.rollout.llm.client import LLMClient
from agentrl.rollout.llm.models import AgentModels, load_agent_models
from agentrl.rollout.scorers.functions import Messages, Scorer, ScorerFunction, conversation
from agentrl.rollout.scorers.judge import Judge
from agentrl.rollout.scorers.math_verifier import MathVerifier
from agentrl.rollout.scorers.results import Score, with_scores
from agentrl.rollout.scorers.reward_service import RewardService
from agentrl.rollout.scorers.ruler import Ruler
from agentrl.rollout.scorers.scorer_registry import (
    JUDGE_NAMES,
    find_scorer,
    known_scorers,
    load_scorers,
)


class Scorers:
    """All scorers of a process; an async context manager that is entered once.

    It owns the models and services of the built-in scorers. `records`: to read conversations.
    """

    def __init__(self, agents: AgentModels, records: RecordLedger) -> None:
        self._records = records
        self._judging = LLMClient(agents.scorer_agent, "the judge")
        self._ranking = LLMClient(agents.ranking_models, "the ranking model")
        self._math = MathVerifier()
        self._service = RewardService(agents.http_scorer)
        judge = Judge(self._judging, agents.judge.judge_prompt_template)
        self._bound: dict[str, ScorerFunction] = {
            "math": self._math.score,
            **dict.fromkeys(JUDGE_NAMES, judge.score),
            "http": self._service.score,
            "ruler": Ruler(self._ranking).score_group,
        }
        self._config = agents.scorer_section
        self._stack = AsyncExitStack()

    @classmethod
    def of_run(cls, config: Config, records: RecordLedger) -> Self:
        """The scorers of a run, not entered yet.

        Raises `AgentModelsError` for `--agent_config_path`, `ConfigError` for `--scorer_module`.
        """
        load_scorers(config)
        return cls(load_agent_models(config.agent.agent_config_path), records)

    async def __aenter__(self) -> Self:
        for part in (self._judging, self._ranking, self._math, self._service):
            await self._stack.enter_async_context(part)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    def of_group(self, scorer: str) -> list[str]:
        """The names in a task's `scorer` that score whole groups.

        Unknown names are skipped: an agent may score its Records under its own names.
        """
        known = known_scorers()
        return [n for n in parse_scorer(scorer) if n in known and find_scorer(n).of_group]

    async def score(self, task: Task, record: Record) -> Record:
        """The Record with `score`, `scores` and `explanations` by its task's scorer.

        `score` is None if a scorer returned None, or scores whole groups and so is called later.
        Raises errors of the scorers, and ValueError for an unknown scorer, a task without the
        required `answer`, or an invalid result.
        """
        alone = [self._find(name) for name in parse_scorer(task.scorer)]
        alone = [scorer for scorer in alone if not scorer.of_group]
        messages: Messages = []
        if any(scorer.needs_messages for scorer in alone):
            (messages,) = await self._conversations([record])
        scores: dict[str, Score] = {}
        for scorer in alone:
            with _outages_met_by(scorer):
                scores[scorer.name] = await scorer.score(task, record, messages)
        return with_scores(task.scorer, record, scores)

    async def score_group(self, task: Task, records: Sequence[Record]) -> list[GroupScore]:
        """The scores of the task's group scorers for its Records.

        Records that another scorer of the task did not score are left out. Raises as `score` does.
        """
        wanted = self.of_group(task.scorer)
        others = parse_scorer(task.scorer).keys() - wanted
        group = [
            record
            for record in records
            if all(record.scores.get(name) is not None for name in others)
        ]
        said: list[GroupScore] = []
        for name in wanted if group else []:
            scorer = self._find(name)
            messages = await self._conversations(group) if scorer.needs_messages else []
            with _outages_met_by(scorer):
                results = await scorer.score_group(task, group, messages)
            said += [
                GroupScore(
                    record=record.id, scorer=name, score=result.value,
                    explanation=result.explanation,
                )
                for record, result in zip(group, results, strict=True)
            ]  # fmt: skip
        return said

    def _find(self, name: str) -> Scorer:
        found = find_scorer(name)
        bound = self._bound.get(name, found.function)
        return replace(found, function=bound, config=self._config)

    async def _conversations(self, records: Sequence[Record]) -> list[Messages]:
        turns = await self._records.turns([record.id for record in records])
        return [conversation(turns[record.id]) for record in records]


@contextmanager
def _outages_met_by(scorer: Scorer) -> Iterator[None]:
    """Set `scorer` on outages raised in the block."""
    try:
        yield
    except InfrastructureFailure as outage:
        outage.scorer = scorer.name
        raise
