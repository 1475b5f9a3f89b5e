"""Notes and labels of people on Records: the one thing that the pages of `agentrl view` write."""

from collections.abc import Sequence
from datetime import UTC, datetime

from pymongo.errors import DuplicateKeyError

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Note

LARGEST = 20_000  # characters of a note


class NoteMoved(ValueError):
    """Somebody has changed the note since it was read. `found`: what it is now."""

    def __init__(self, found: Note | None) -> None:
        done = "changed" if found else "removed"
        super().__init__(f"somebody has {done} this note since this page was read")
        self.found = found


async def read_note(database: RunDatabase, record: str) -> Note | None:
    """The note on a Record; None if there is none."""
    document = await database.notes.find_one({"_id": record})
    return None if document is None else Note.from_mongo(document)


async def write_note(
    database: RunDatabase, record: str, text: str, labels: Sequence[str], seen: datetime | None
) -> None:
    """Write the note on a Record in place of the one before, which its writer saw: an empty one is
    removed. `seen`: `changed_at` of that one; None: there was none.

    Raises ValueError if it is too long or there is no such Record, and `NoteMoved`.
    """
    if len(text) > LARGEST:
        raise ValueError(f"a note may have {LARGEST} characters, this one has {len(text)}")
    if await database.records.find_one({"_id": record}, {"_id": 1}) is None:
        raise ValueError(f"run {database.name} has no record {record!r}")
    now = datetime.now(UTC)
    note = Note(id=record, text=text, labels=sorted(set(labels)), changed_at=now)
    empty = not text and not labels
    if empty and seen is not None:
        done = (await database.notes.delete_one({"_id": record, "changed_at": seen})).deleted_count
    elif seen is not None:
        before = {"_id": record, "changed_at": seen}
        done = (await database.notes.replace_one(before, note.to_mongo())).matched_count
    elif empty:
        done = 0
    else:
        try:
            await database.notes.insert_one(note.to_mongo())
            done = 1
        except DuplicateKeyError:
            done = 0
    if done:
        return
    found = await read_note(database, record)
    there = (found.text, found.labels) if found else ("", [])
    # Somebody may have written the same, or this was sent twice.
    if there != (note.text, note.labels):
        raise NoteMoved(found)


async def labels_in_use(database: RunDatabase) -> list[str]:
    """All labels of a run's notes, sorted."""
    return sorted(await database.notes.distinct("labels"))
