"""Rows that are larger than MongoDB's documents: their columns are stored beside them, in parts.

    divide    a row -> its document, and the parts that it names if it is too large for one
    join      the document as it was read -> with its columns

A row of some 240,000 tokens still is one document. Longer ones come of conversations that share
little between turns, as with a chat template that writes the time at the head of each prompt. The
id of a part follows from what it holds, so that a repetition changes nothing, and other values of a
column are other parts.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DBRecordData
from agentrl.databases.storable import weight

PARTS = "parts"  # of a row's document: by column, the ids of its parts in order
# Bytes of a row, or of a part, in one document. MongoDB takes 16 MiB. With the smallest cache, that
# of an embedded mongod, it refuses 12 MiB, because their transaction would not fit.
_LARGEST = 4 * 2**20


def divide(row: DBRecordData) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The row as MongoDB can store it: its document, and its parts, which must be stored before."""
    document = row.to_mongo()
    if weight(document) <= _LARGEST:
        return document, []
    parts: list[dict[str, Any]] = []
    named: dict[str, list[str]] = {}
    for column in [name for name, value in document.items() if isinstance(value, bytes)]:
        of_column = list(_parts(row.id, column, document.pop(column)))
        named[column] = [part["_id"] for part in of_column]
        parts += of_column
    return {**document, PARTS: named}, parts


async def join(database: RunDatabase, document: dict[str, Any]) -> dict[str, Any]:
    """A row's document with all its columns, to make a `DBRecordData` of.

    Raises `ValueError` if a part is not there.
    """
    named: dict[str, list[str]] | None = document.pop(PARTS, None)
    if named is None:
        return document
    ids = [part for of_column in named.values() for part in of_column]
    held = {part["_id"]: part["data"] async for part in database.parts.find({"_id": {"$in": ids}})}
    missing = next((part for part in ids if part not in held), None)
    if missing is not None:
        raise ValueError(f"row {document['_id']}: its part {missing} is not in record_data_parts")
    columns = {name: b"".join(held[part] for part in parts) for name, parts in named.items()}
    return {**document, **columns}


def _parts(row: str, column: str, data: bytes) -> Iterator[dict[str, Any]]:
    for start in range(0, len(data), _LARGEST):
        piece = data[start : start + _LARGEST]
        digest = hashlib.blake2b(piece, digest_size=8).hexdigest()
        yield {"_id": f"{row}-{column}-{start}-{digest}", "row": row, "data": piece}
