"""`agentrl rescore`: scores the stored trajectories of a run again.

    agentrl rescore RUN --scorer ruler
    agentrl rescore RUN --scorer "0.7*math + 0.3*f1" --where split=eval "turns>4"

Scores, advantages and untrained rows are computed again, with the flags of the run's launch and
those given here. Each Record keeps its old scores in `score_history`.
"""

import asyncio
from collections.abc import Sequence

from rich.console import Console

from agentrl.configs import Config, ConfigError
from agentrl.configs.verbs import rescore_parser
from agentrl.databases.records import RecordLedger
from agentrl.databases.rescoring import Rescoring, RowOutcome
from agentrl.databases.scorer_notation import parse_scorer
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.database import launched_config, run_database
from agentrl.launcher.preflight import agent_config_of
from agentrl.launcher.record_filter import (
    Filter,
    read_conditions,
    refused_by_mongod,
    resolved_in,
)
from agentrl.rollout.groups.rescoring import Rescorer, RescoringReport
from agentrl.rollout.llm.models import load_agent_models
from agentrl.rollout.scorers import Scorers
from agentrl.rollout.scorers.scorer_registry import find_scorer, load_scorers, missing_for

_SHOWN_FAILURES = 10
_LEASE_S = 60.0  # unused: completed groups are changed without a lease


def main(argv: Sequence[str]) -> int:
    """Run `agentrl rescore RUN --scorer NAME [--where ...] [flags]`; returns the exit status.

    It is 1 if a group could not be scored. Raises for bad input before anything is written.
    """
    given = rescore_parser().parse(argv)
    arguments = given.own
    config = launched_config(given)
    conditions = read_conditions(arguments.where)
    check_scorer(arguments.scorer, config)
    report = asyncio.run(_rescore(config, arguments.scorer, conditions))
    print_report(TerminalConsole(), report, config.run.run_name)
    return 1 if report.failures else 0


def check_scorer(scorer: str, config: Config) -> None:
    """Raise `ConfigError` if a scorer is unknown, or if the agent config lacks what it needs."""
    load_scorers(config)
    agents = load_agent_models(config.agent.agent_config_path)
    try:
        names = parse_scorer(scorer)
        for name in names:
            find_scorer(name)
    except ValueError as error:
        raise ConfigError(f"--scorer: {error}") from None
    for name in names:
        missing = missing_for(name, agents)
        if missing is not None:
            raise ConfigError(f"--scorer {name} {missing} of {agent_config_of(config)}")


async def _rescore(config: Config, scorer: str, conditions: Filter) -> RescoringReport:
    async with run_database(config, run_lives=True) as opened:
        records = RecordLedger(opened.database, _LEASE_S)
        ledger = Rescoring(opened.database)
        async with Scorers.of_run(config, records) as scorers:
            rescorer = Rescorer(
                ledger, records, scorers, config.reward, config.temperature,
                config.sampling.max_tokens,
            )  # fmt: skip
            with refused_by_mongod():
                groups = await ledger.groups(await resolved_in(opened.database, conditions))
            return await rescorer.rescore(groups, scorer)


def print_report(console: Console, report: RescoringReport, run: str) -> None:
    """Print how many groups, records and rows changed, and which did not."""
    rows = report.rows
    lines = [
        f"run {run}: {report.groups} groups with {report.records} records are scored again, "
        f"{report.unscored} of them have no score now",
        f"rows: {rows[RowOutcome.REWRITTEN]} have new advantages, {rows[RowOutcome.ADDED]} are "
        f"new, {rows[RowOutcome.WITHDRAWN]} are withdrawn",
    ]
    if rows[RowOutcome.STAYED]:
        lines.append(
            f"{rows[RowOutcome.STAYED]} rows were trained, leased for training or too old, and "
            "stay as they were: `score_history` of their records says so"
        )
    if report.in_progress:
        lines.append(f"{report.in_progress} groups are still in progress and were skipped")
    if report.failures:
        lines.append(f"{len(report.failures)} groups could not be scored again:")
        shown = list(report.failures.items())[:_SHOWN_FAILURES]
        lines += [f"  {task}: {error}" for task, error in shown]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
