"""`agentrl.open_run`: the documents of a run as Arrow tables, for notebooks.

    with agentrl.open_run("output/demo") as run:           # or "mongodb://host:27017/demo"
        records = run.records("score<0.5").to_pandas()
        tokens = run.turns(records["id"]).to_pandas()

Fields of documents are columns, with dots for nested ones (`scores.exact_match`). Lists of
documents (slots, messages, tool calls) are JSON texts, and token arrays are lists of numbers.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import pyarrow as pa
from bson import json_util
from numpy.typing import NDArray
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import PyMongoError
from pymongo.uri_parser import parse_uri

from agentrl.configs import ConfigError
from agentrl.databases.arrays import pack_floats, unpack_floats, unpack_ints, unpack_mask
from agentrl.databases.connection import DatabaseUnreachable, is_outage
from agentrl.databases.documents import Split, TrainedStep
from agentrl.databases.row_parts import PARTS
from agentrl.databases.token_tree import TokenTree
from agentrl.databases.trained_logprobs import trainer_entropies, trainer_logprobs
from agentrl.launcher.database import mongod_of, run_place, running_mongod
from agentrl.launcher.record_filter import (
    LARGEST_LOOKUP,
    lookups,
    names_field,
    read_conditions,
    resolved,
)
from agentrl.redaction import without_passwords

# Token arrays of turns and rows, by the function that reads them.
_ARRAYS: Mapping[str, Callable[[bytes], NDArray[Any]]] = {
    "prompt_delta_ids": unpack_ints, "output_ids": unpack_ints, "output_logprobs": unpack_floats,
    "input_ids": unpack_ints, "loss_mask": unpack_mask, "logprobs": unpack_floats,
    "versions": unpack_ints, "advantages": unpack_floats, "capped": unpack_mask,
    "trainer_logprobs": unpack_floats, "trainer_entropies": unpack_floats,
}  # fmt: skip
_IDS = 1000  # of Records that one query names
_ANSWER_MS = 3_000  # that a mongod on this machine is waited for, before it is looked for again
T = TypeVar("T")
Documents = Iterable[Mapping[str, Any]]


def open_run(place: str | Path) -> "OpenRun":
    """Open a run for reading. `place`: its folder, or a MongoDB URL that ends with its name.

    The MongoDB of a finished run is started, and ends with `close`; so it is if another process had
    it open and closes it. Raises `ConfigError` if no run is there, `DatabaseUnreachable`.
    """
    return OpenRun(str(place))


class OpenRun:
    """A run's documents as tables. Use it as a context manager, or call `close`."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._stack = ExitStack()
        try:
            self._open()
            self._again_if_closed(self._check_there)
        except BaseException:
            self._stack.close()
            raise

    def _open(self) -> None:
        """Find the run's database, and start its mongod if it is to be started."""
        self._stack.close()
        url, self.name, self._folder = self._find(self._place)
        client: MongoClient[dict[str, Any]] = MongoClient(url, tz_aware=True)
        self._stack.callback(client.close)
        self._database = client[self.name]

    def _check_there(self) -> None:
        if self.name not in self._database.client.list_database_names():
            raise ConfigError(f"there is no run {self.name!r} at {self._place}")

    def _again_if_closed(self, read: Callable[[], T]) -> T:
        """What `read` returns; once more if another process closed the run's own MongoDB meanwhile.

        Raises `DatabaseUnreachable`.
        """
        try:
            try:
                return read()
            except PyMongoError as error:
                if not (is_outage(error) and self._is_own):
                    raise
                self._open()
                return read()
        except PyMongoError as error:
            if not is_outage(error):
                raise
            shown = without_passwords(self._place)
            raise DatabaseUnreachable(
                f"open_run {shown}: MongoDB does not answer: {error}"
            ) from None

    def _read(self, find: Callable[[Database[dict[str, Any]]], Documents]) -> pa.Table:
        return self._again_if_closed(lambda: _table(find(self._database)))

    def _find(self, place: str) -> tuple[str, str, Path | None]:
        """URL, name and folder of the run."""
        self._is_own = False  # whether the MongoDB is the run's own
        if place.startswith(("mongodb://", "mongodb+srv://")):
            name = parse_uri(place)["database"]
            if name is None:
                raise ConfigError(
                    "open_run: the MongoDB URL must end with the run's name, as /demo"
                )
            return place, name, None
        folder = Path(place).absolute()
        config = run_place({"run_name": folder.name, "output_dir": str(folder)})
        data = folder / "mongo"
        if config.run.db_connection_string is not None:
            return config.run.db_connection_string, folder.name, folder
        if not data.is_dir():
            raise ConfigError(f"open_run: there is no run in {place}")
        url = running_mongod(data)
        if url is None:
            mongod = mongod_of(config)
            url = mongod.start()
            self._stack.callback(mongod.stop)
        self._is_own = True
        return f"{url}&serverSelectionTimeoutMS={_ANSWER_MS}", folder.name, folder

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the database."""
        self._stack.close()

    def tasks(self, split: str = "train") -> pa.Table:
        """Tasks, the groups of rollouts, in their order."""
        wanted = {"split": Split(split)}
        return self._read(lambda run: run["tasks"].find(wanted).sort("group_order", 1))

    def records(self, *conditions: str, split: str = "train") -> pa.Table:
        """Records that meet all conditions, which are those of `agentrl show --where`."""
        given = read_conditions(conditions)

        def find(run: Database[dict[str, Any]]) -> Documents:
            found = {
                name: run[lookup.collection]
                .find(lookup.wanted, lookup.fields)
                .to_list(LARGEST_LOOKUP + 1)
                for name, lookup in lookups(given).items()
            }
            filters: list[Mapping[str, Any]] = [resolved(given, found)]
            if not names_field(given, "split"):
                filters.append({"split": Split(split)})
            return run["records"].find({"$and": filters}).sort("started_at", 1)

        return self._read(find)

    def turns(self, records: Iterable[str] | None = None) -> pa.Table:
        """Turns, of all Records or of those with these ids."""
        return self._of("dispatched_sampling_tasks", "record_id", records)

    def rows(self, records: Iterable[str] | None = None) -> pa.Table:
        """Training rows, of all Records or of those with these ids.

        `trainer_logprobs` and `trainer_entropies` (with `--log_entropy`) are those of the last step
        that kept them, and 0 on tokens that are not trained. Columns of tokens that are stored in
        parts, of rows above 4 MB, are empty.
        """
        return self._of("record_data", "_id", records, _with_trainer)

    def notes(self, records: Iterable[str] | None = None) -> pa.Table:
        """Notes and labels of people, on all Records or on those with these ids (`id`)."""
        return self._of("notes", "_id", records)

    def metrics(self) -> pa.Table:
        """The trainer's figures, one row for each step."""
        file = None if self._folder is None else self._folder / "metrics.jsonl"
        if file is not None and file.is_file():
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            return _table(json.loads(line) for line in lines if line.endswith("\n"))
        return self._read(
            lambda run: (line["values"] for line in run["step_metrics"].find().sort("_id", 1))
        )

    def _of(
        self,
        collection: str,
        field: str,
        records: Iterable[str] | None,
        shown: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda document: document,
    ) -> pa.Table:
        ids = None if records is None else list(records)

        def find(run: Database[dict[str, Any]]) -> Documents:
            if ids is None:
                yield from map(shown, run[collection].find().sort("_id", 1))
                return
            for start in range(0, len(ids), _IDS):
                wanted = {field: {"$in": ids[start : start + _IDS]}}
                yield from map(shown, run[collection].find(wanted).sort("_id", 1))

        return self._read(find)


def _with_trainer(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row with the trainer's logprobs and entropies as columns of their own."""
    marks = [TrainedStep.model_validate(mark) for mark in row["trained"]]
    shown = [mark.model_dump(exclude={"logprobs", "entropies"}) for mark in marks]
    plain = {**row, "trained": shown}
    if PARTS in row:
        return plain
    tree = TokenTree.unpack(dict(row))
    known = {
        "trainer_logprobs": trainer_logprobs(tree, marks),
        "trainer_entropies": trainer_entropies(tree, marks),
    }
    return {**plain, **{name: pack_floats(own) for name, own in known.items() if own is not None}}


def _table(documents: Documents) -> pa.Table:
    """Documents as a table, with the columns of all of them."""
    columns: dict[str, list[Any]] = {}
    n_rows = 0
    for document in documents:
        for name, value in _flat(document):
            column = columns.setdefault(name, [])
            column.extend([None] * (n_rows - len(column)))
            column.append(value)
        n_rows += 1
    arrays = {}
    for name, values in columns.items():
        values.extend([None] * (n_rows - len(values)))
        arrays[name] = _array(values)
    return pa.table(arrays)


def _flat(document: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in document.items():
        column = before + ("id" if name == "_id" else name)
        if isinstance(value, bytes) and name in _ARRAYS:
            yield column, _ARRAYS[name](value).tolist()
        elif isinstance(value, Mapping) and _are_plain(value.values()):
            yield from _flat(value, f"{column}.")
        elif isinstance(value, Mapping) or (isinstance(value, list) and not _are_plain(value)):
            yield column, json_util.dumps(value, ensure_ascii=False)
        else:
            yield column, value


def _are_plain(values: Iterable[Any]) -> bool:
    return all(isinstance(v, str | int | float | bool | datetime | None) for v in values)


def _array(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        # Values of several types, which users' own fields may have.
        return pa.array([None if value is None else str(value) for value in values])
