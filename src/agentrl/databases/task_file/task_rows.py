"""Random access to the tasks of a file, without reading the whole file into memory.

JSONL       from the file itself, by the stored offsets of its lines
Parquet     from a stored copy in Arrow format, which allows access to any row
a JSON list in memory, because it has no lines

Offsets and copies are stored in a folder of the run, under the digest of the file's content. So a
resumed run does not read the file again (`known_digest`).
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np

from agentrl.databases.task_file.file_rows import (
    BATCH_ROWS,
    Row,
    UnreadableFile,
    is_list,
    is_table,
    line_row,
    read_rows,
    table_row,
)
from agentrl.databases.task_file.reader import TaskFileError, task_of_row
from agentrl.databases.task_file.task_line import TaskLine
from agentrl.file_digest import CHUNK, Digest, file_digest
from agentrl.whole_file import write_whole

_MARK = b"\xef\xbb\xbf"  # byte order mark of UTF-8
_SPACES = np.frombuffer(bytes([*range(9, 14), *range(28, 33)]), np.uint8)
_FILES = "files.json"
_SETTLED_S = 2.0  # a younger file may change again without a new time stamp


@dataclass(frozen=True)
class _Lines:
    """Byte offsets and line numbers [n] of the lines that are not empty."""

    starts: "np.ndarray[Any, np.dtype[np.int64]]"
    numbers: "np.ndarray[Any, np.dtype[np.int64]]"


class TaskRows(Sequence[TaskLine]):
    """The tasks of a file; each row is read on access.

    Access raises `TaskFileError` for a bad row, and if the file has changed.
    """

    def __init__(self, path: Path, rows: int, row: Callable[[int], Row]) -> None:
        self._path = path
        self._rows = rows
        self._row = row

    def __len__(self) -> int:
        return self._rows

    @overload
    def __getitem__(self, index: int) -> TaskLine: ...
    @overload
    def __getitem__(self, index: slice) -> list[TaskLine]: ...
    def __getitem__(self, index: int | slice) -> TaskLine | list[TaskLine]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._rows))]
        if not -self._rows <= index < self._rows:
            raise IndexError(index)
        row = self._row(index % self._rows)
        try:
            return task_of_row(row)
        except ValueError as error:
            raise TaskFileError(f"{row.place_in(self._path)}: {error}") from None


def open_tasks(path: Path, folder: Path) -> TaskRows:
    """The tasks of a file, which are not checked before access. `folder`: keeps its index.

    Raises `TaskFileError` if the file cannot be read or has no tasks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if is_table(path):
            rows = _open_table(path, folder)
        elif is_list(path):
            listed = list(read_rows(path))
            rows = TaskRows(path, len(listed), listed.__getitem__)
        else:
            rows = _open_lines(path, folder)
    except UnreadableFile as error:
        raise TaskFileError(f"task file {path} {error}") from None
    except OSError as error:
        raise TaskFileError(f"task file {path} cannot be read: {error.strerror}") from None
    if not rows:
        raise TaskFileError(f"task file {path} holds no task")
    return rows


def known_digest(path: Path, folder: Path) -> str | None:
    """The digest of a file's content; None if there is no file.

    The content is read only if path, size, inode or times differ from the note in `folder`, as in
    Git.
    """
    if not path.is_file():
        return None
    known = _known_files(folder).get(str(path.absolute()))
    if known is not None and known[:-1] == _stamp(path.stat()):
        return str(known[-1])
    digest = file_digest(path)
    assert digest is not None, "it is a file"
    _remember(path, folder, digest)
    return digest


def _known_files(folder: Path) -> dict[str, list[Any]]:
    try:
        found: dict[str, list[Any]] = json.loads((folder / _FILES).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}  # the files are read again
    return found


def _stamp(stat: os.stat_result) -> list[Any]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _remember(path: Path, folder: Path, digest: str) -> None:
    """Note a file's digest, if `folder` exists and the file was not changed just now."""
    stat = path.stat()
    if not folder.is_dir() or time.time() - stat.st_mtime < _SETTLED_S:
        return
    notes = {**_known_files(folder), str(path.absolute()): [*_stamp(stat), digest]}
    with write_whole(folder / _FILES) as partial:
        partial.write_text(json.dumps(notes, indent=1), encoding="utf-8")


def _open_lines(path: Path, folder: Path) -> TaskRows:
    file = path.open("rb")
    opened = _stamp(os.fstat(file.fileno()))
    known = _known_files(folder).get(str(path.absolute()))
    lines = None
    if known is not None and known[:-1] == opened:
        lines = _load_lines(_lines_file(folder, known[-1]))
    if lines is None:
        lines, digest = _find_lines(path)
        with write_whole(_lines_file(folder, digest)) as partial, partial.open("wb") as kept:
            np.savez(kept, starts=lines.starts, numbers=lines.numbers)
        _remember(path, folder, digest)
    return TaskRows(path, len(lines.starts), lambda index: _line(path, file, opened, lines, index))


def _line(path: Path, file: BinaryIO, opened: list[Any], lines: _Lines, index: int) -> Row:
    number = int(lines.numbers[index])
    # Size and time of the open file: the path may name another file by now.
    if _stamp(os.fstat(file.fileno()))[:2] != opened[:2]:
        raise TaskFileError(
            f"task file {path} was changed while the run reads it: stop the run, and start it "
            "again with the file as it was, or with another one by --change_data"
        )
    file.seek(int(lines.starts[index]))
    try:
        return line_row(number, file.readline().decode())
    except UnicodeDecodeError as error:
        return Row(number, {}, f"not UTF-8 text: {error}", "line")


def _lines_file(folder: Path, digest: str) -> Path:
    return folder / f"{digest}.npz"


def _load_lines(file: Path) -> _Lines | None:
    try:
        with np.load(file) as kept:
            return _Lines(kept["starts"], kept["numbers"])
    except (FileNotFoundError, ValueError, EOFError, KeyError):
        return None  # the lines are found again


def _find_lines(path: Path) -> tuple[_Lines, str]:
    """The lines of a file and its digest, found in one pass."""
    digest = Digest()
    starts: list[Any] = []
    firsts: list[Any] = []  # the first byte of each line
    with path.open("rb") as file:
        digest.begin(os.fstat(file.fileno()).st_size)
        base = 0
        open_start: int | None = 0  # start of a line that begins with the next chunk
        while chunk := file.read(CHUNK):
            digest.add(chunk)
            piece = np.frombuffer(chunk, np.uint8)
            if base == 0 and chunk.startswith(_MARK):
                open_start = len(_MARK)
            begun = np.flatnonzero(piece == ord("\n")).astype(np.int64) + (base + 1)
            if open_start is not None:
                begun = np.concatenate([np.array([open_start], np.int64), begun])
            end = base + len(chunk)
            open_start = end if begun[-1:].tolist() == [end] else None
            within = begun[begun < end]
            starts.append(within)
            firsts.append(piece[within - base])
            base = end
    all_starts = np.concatenate(starts) if starts else np.zeros(0, np.int64)
    first = np.concatenate(firsts) if firsts else np.zeros(0, np.uint8)
    kept = np.ones(len(all_starts), bool)
    with path.open("rb") as file:
        for index in np.flatnonzero(np.isin(first, _SPACES) | (first >= 0x80)):
            file.seek(int(all_starts[index]))
            kept[index] = bool(file.readline().decode(errors="replace").strip())
    numbers = np.arange(1, len(all_starts) + 1, dtype=np.int64)
    return _Lines(all_starts[kept], numbers[kept]), digest.text()


def _open_table(path: Path, folder: Path) -> TaskRows:
    # Imported here: the import is slow, and few runs read Parquet.
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    copy = folder / f"{known_digest(path, folder)}.arrow"
    try:
        if not copy.exists():
            with (
                pyarrow.parquet.ParquetFile(path) as table,
                write_whole(copy) as partial,
                pyarrow.ipc.new_file(partial, table.schema_arrow) as kept,
            ):
                for batch in table.iter_batches(batch_size=BATCH_ROWS):
                    kept.write_batch(batch)
        reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(copy)))
        sizes = [reader.get_batch(n).num_rows for n in range(reader.num_record_batches)]
    except pyarrow.ArrowException as error:
        raise UnreadableFile(f"is not a readable Parquet file: {error}") from None
    ends = np.cumsum(sizes)

    def row(index: int) -> Row:
        number = int(np.searchsorted(ends, index, side="right"))
        place = index - (int(ends[number - 1]) if number else 0)
        (fields,) = reader.get_batch(number).slice(place, 1).to_pylist()
        return table_row(index + 1, fields)

    return TaskRows(path, int(ends[-1]) if sizes else 0, row)
