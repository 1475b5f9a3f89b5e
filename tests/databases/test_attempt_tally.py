"""Attempts are counted as they end, by kind of error, and none twice or never."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from agentrl.databases.attempt_tally import AttemptCounts, AttemptTally
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import HANDED_BACK, Record, RecordStatus, Split

BEGAN = datetime(2026, 11, 22, 12, tzinfo=UTC)
TOO_LONG = "RuntimeError: the prompt of {} tokens does not fit (at ask, agent.py:7)"
NO_KEY = "KeyError: 'answer' (at agent, agent.py:9)"


async def end(
    database: RunDatabase, seconds: float, errors: Sequence[str | None], split: Split = Split.TRAIN
) -> None:
    """Attempts that ended so many seconds after `BEGAN`."""
    n = await database.records.count_documents({})
    for number, error in enumerate(errors, start=n):
        record = Record(
            id=f"g-t{number}-a0", task="g", task_id="g", rollout=number, attempt=0, split=split,
            epoch=0, owner="s", status=RecordStatus.FAILED if error else RecordStatus.SCORED,
            query="?", error=error, finished_at=BEGAN + timedelta(seconds=seconds),
        )  # fmt: skip
        await database.records.insert_one(record.to_mongo())


async def test_attempts_are_counted_once_whenever_it_is_looked(database: RunDatabase) -> None:
    await end(database, -5, [None, NO_KEY])  # of the launch before
    tally = AttemptTally(database, BEGAN)
    ended = failed = 0
    for look in range(0, 400, 20):
        await end(database, look + 1, [None, TOO_LONG.format(look), NO_KEY])
        # Another machine's clock is behind: this one ended "before" what was seen already.
        await end(database, look - 15 if look else 1, [TOO_LONG.format("many")], Split.EVAL)
        await end(database, look + 2, [f"{HANDED_BACK}the service is gone"])
        ended, failed = ended + 4, failed + 3
        counts = await tally.read(BEGAN + timedelta(seconds=look + 10))
        assert (counts.ended, counts.failed, counts.stored) == (ended, failed, ended - failed)
    assert [count for count, _ in counts.kinds] == [40, 20], "the words between may differ"
    assert counts.most_failed
    assert counts.sentence is not None
    assert counts.sentence.startswith("60 of 80 attempts failed: 40 × RuntimeError: the prompt of ")
    assert counts.sentence.endswith(f"; 20 × {NO_KEY}")


async def test_what_a_run_loses_to_nobodys_fault_is_no_failure(database: RunDatabase) -> None:
    await end(database, 1, [f"{HANDED_BACK}no service"] * 3 + [None])
    counts = await AttemptTally(database, BEGAN).read(BEGAN)
    assert counts == AttemptCounts(ended=1) and counts.sentence is None
    assert not counts.most_failed


def test_many_kinds_are_not_all_told() -> None:
    kinds = tuple((9 - n, f"E{n}: x") for n in range(5))
    told = AttemptCounts(ended=50, failed=35, kinds=kinds).sentence
    assert told == ("35 of 50 attempts failed: 9 × E0: x; 8 × E1: x; 7 × E2: x; and 2 other kinds")
