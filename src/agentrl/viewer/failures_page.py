"""The page of a run's failures: by class and dependency, with their errors and what to do."""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime

from agentrl.databases import outages
from agentrl.databases.documents import HANDED_BACK, Record, RecordStatus, Split
from agentrl.databases.failed_tasks import FailedTask, count_failed_tasks, failed_tasks
from agentrl.databases.quarantine import QuarantinedItem, list_quarantined
from agentrl.databases.runs import load_run
from agentrl.viewer.places import Place

_SHOWN = 200
_READ = 2000  # newest failed attempts


@dataclass(frozen=True)
class FailuresPage:
    """What the page shows. `kinds`: errors of failed attempts, with their number and a Record."""

    hopeless: str | None
    waiting: list[str]
    kinds: list[tuple[str, int, str]]
    handed_back: int
    n_failed: int
    tasks: list[FailedTask]
    quarantined: list[QuarantinedItem]


async def read_failures_page(place: Place) -> FailuresPage:
    """Read it: the newest failures, by indexes."""
    database = place.database
    run = await load_run(database)
    now = datetime.now(UTC)
    failed = database.records.find(
        {"status": RecordStatus.FAILED, "split": {"$in": list(Split)}}, hint="failed"
    )
    kinds: Counter[str] = Counter()
    example: dict[str, str] = {}
    handed_back = 0
    async for document in failed.sort("finished_at", -1).limit(_READ):
        record = Record.from_mongo(document)
        error = record.error or "without an error"
        if error.startswith(HANDED_BACK):
            handed_back += 1
            continue
        kind = error.splitlines()[0][:300]
        kinds[kind] += 1
        example.setdefault(kind, record.id)
    return FailuresPage(
        hopeless=run.failure if run else None,
        waiting=[outage.sentence(now) for outage in await outages.current(database)],
        kinds=[(kind, count, example[kind]) for kind, count in kinds.most_common()],
        handed_back=handed_back,
        n_failed=await count_failed_tasks(database),
        tasks=list(reversed(await failed_tasks(database, _SHOWN))),
        quarantined=await list_quarantined(database, _SHOWN),
    )
