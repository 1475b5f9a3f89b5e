"""The best and the worst rollouts of a step, as trackers show them."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from agentrl.configs import ConfigError
from agentrl.databases.connection import RunDatabase
from agentrl.databases.conversation import conversation
from agentrl.databases.documents import DispatchedSamplingTask, Record
from agentrl.databases.row_ledger import RowHeader

_EACH = 3  # rollouts at either end
_LONGEST = 10_000  # characters of a text
VIEW_URL = "AGENTRL_VIEW_URL"


@dataclass(frozen=True)
class Rollout:
    """A row of the table. `which`: best or worst. `look`: its page, or the command to see it."""

    which: str
    score: float | None
    reward: float
    task: str
    record: str
    stop: str
    text: str
    look: str


async def read_rollouts(
    database: RunDatabase, rows: Sequence[RowHeader], pages: str | None
) -> list[Rollout]:
    """The rows of highest and of lowest reward, best first. `pages`: from `pages_address`."""
    ordered = sorted(rows, key=lambda row: (-row.reward, row.id))
    n_best = min(_EACH, (len(ordered) + 1) // 2)
    n_worst = min(_EACH, len(ordered) - n_best)
    chosen = [(row, "best") for row in ordered[:n_best]]
    chosen += [(row, "worst") for row in ordered[len(ordered) - n_worst :]]
    ids = [row.id for row, _ in chosen]
    records = {
        found["_id"]: Record.from_mongo(found)
        async for found in database.records.find({"_id": {"$in": ids}})
    }
    turns: dict[str, list[DispatchedSamplingTask]] = {record: [] for record in ids}
    async for found in database.turns.find({"record_id": {"$in": ids}}).sort("turn", 1):
        turns[found["record_id"]].append(DispatchedSamplingTask.from_mongo(found))
    return [
        Rollout(
            which=which,
            score=records[row.id].score,
            reward=row.reward,
            task=records[row.id].task_id,
            record=row.id,
            stop=str(records[row.id].stop_reason),
            text=_text(turns[row.id]),
            look=look_at(database.name, row.id, pages),
        )
        for row, which in chosen
        if row.id in records
    ]


def _text(turns: Sequence[DispatchedSamplingTask]) -> str:
    said = "\n\n".join(f"[{part.role}] {part.text}" for part in conversation(turns))
    left = len(said) - _LONGEST
    return said if left <= 0 else f"{said[:_LONGEST]}… ({left} more characters)"


def pages_address() -> str | None:
    """The address of `agentrl view`, if the environment has it. Raises `ConfigError`."""
    address = os.environ.get(VIEW_URL, "").strip().rstrip("/")
    if not address:
        return None
    if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname:
        raise ConfigError(
            f"{VIEW_URL}={address}: give the address of `agentrl view`, as http://host:8265"
        )
    if "?" in address:
        raise ConfigError(
            f"{VIEW_URL}: give the address without the token, which opens all runs to whoever "
            "reads it in a tracker"
        )
    return address


def look_at(run: str, record: str | None, pages: str | None) -> str:
    """Where a run or one of its Records is seen: its page, or without an address the command."""
    if pages is None:
        words = ["view", run] if record is None else ["show", run, record]
        return shlex.join(["agentrl", *words])
    page = f"{pages}/run/{quote(run, safe='')}"
    return page if record is None else f"{page}/records/{quote(record, safe='')}"
