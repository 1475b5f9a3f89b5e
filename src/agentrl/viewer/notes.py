"""Notes and labels of people on Records: the one thing that the pages write."""

from collections.abc import Sequence
from datetime import UTC, datetime

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Note

LARGEST = 20_000  # characters of a note


async def read_note(database: RunDatabase, record: str) -> Note | None:
    """The note on a Record; None if there is none."""
    document = await database.notes.find_one({"_id": record})
    return None if document is None else Note.from_mongo(document)


async def write_note(database: RunDatabase, record: str, text: str, labels: Sequence[str]) -> None:
    """Write the note on a Record, in place of the one before; an empty one is removed.

    Raises ValueError if it is too long.
    """
    if len(text) > LARGEST:
        raise ValueError(f"a note may have {LARGEST} characters, this one has {len(text)}")
    if not text and not labels:
        await database.notes.delete_one({"_id": record})
        return
    note = Note(id=record, text=text, labels=sorted(set(labels)), changed_at=datetime.now(UTC))
    await database.notes.replace_one({"_id": record}, note.to_mongo(), upsert=True)


async def labels_in_use(database: RunDatabase) -> list[str]:
    """All labels of a run's notes, sorted."""
    return sorted(await database.notes.distinct("labels"))


async def labelled(database: RunDatabase, label: str) -> list[str]:
    """The Records with a label."""
    return [note["_id"] async for note in database.notes.find({"labels": label}, {"_id": 1})]
