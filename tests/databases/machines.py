"""Hypothesis machines that work on a real database, one example after the other."""

import asyncio
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from agentrl.databases.connection import RunDatabase, connect
from agentrl.databases.mongod import EmbeddedMongod


def run_machine(
    machine: Callable[[asyncio.Runner, RunDatabase], RuleBasedStateMachine],
    mongod: EmbeddedMongod,
    steps: int,
) -> None:
    """Run examples of so many steps, on a database that is dropped afterwards."""
    with asyncio.Runner() as run:
        database = run.run(connect(mongod.url, "machine"))
        try:
            run_state_machine_as_test(
                lambda: machine(run, database),
                settings=settings(
                    max_examples=settings.default.max_examples * 2 // 5,
                    stateful_step_count=steps,
                    deadline=None,
                    suppress_health_check=[HealthCheck.too_slow],
                ),
            )
        finally:
            run.run(database.client.drop_database(database.name))
            run.run(database.close())
