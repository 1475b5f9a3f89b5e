"""A file of demonstrations or pairs as a folder of token trees, made once for file and template.

Rows that cannot be trained are left out and named. The folder's name is a digest of all that it
depends on, so that a resumed training finds the same rows, and other data are seen to be others.
"""

import json
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.databases.pair_tree import pair_tree
from agentrl.databases.task_file.file_rows import Row, UnreadableFile, is_table, read_rows
from agentrl.databases.token_tree import TokenTree
from agentrl.databases.tree_file import TreeFile, TreeFileError, write_trees
from agentrl.file_digest import Digest, file_digest
from agentrl.importing import importing
from agentrl.rollout.chat import ChatRenderer
from agentrl.rollout.demonstrations.absent import without_absent
from agentrl.rollout.demonstrations.layouts import (
    Demonstration,
    PlainText,
    read_demonstration,
)
from agentrl.rollout.demonstrations.preferences import read_preference
from agentrl.rollout.demonstrations.tokens import demonstrated_tree, plain_trees

_FORMAT = "5"  # of the trees: a change makes all files be prepared anew
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_CHUNK = 64  # rows that a worker takes at once
_ALONE = 512  # rows that are sooner prepared than processes are started


class MadeRow(NamedTuple):
    """What a row became: its place, and its tree or why it has none.

    `unread`: fields of its messages that hold something and are not read. `remarks`: sentences on
    what else the user may not expect.
    """

    place: str
    made: TokenTree | str
    unread: frozenset[str] = frozenset()
    remarks: frozenset[str] = frozenset()


class UnusableRows(ValueError):
    """A file or a run gives nothing to train. The message is for the user."""


@dataclass(frozen=True)
class PreparedRows:
    """Rows in `folder`.

    left_out: why rows are not among them, by their places in the file
    unread: in how many of them messages have a field that is not read, by the field's name
    remarks: of how many of them a sentence is true, by the sentence
    """

    folder: Path
    left_out: Mapping[str, str]
    unread: Mapping[str, int]
    remarks: Mapping[str, int]


@dataclass(frozen=True)
class Preparation:
    """How rows become trees.

    longest: tokens of the longest sequence that is trained
    pairs: whether a row is a pair of answers, and its tree a `pair_tree`
    """

    model: Path
    template_options: Mapping[str, Any]
    longest: int
    pairs: bool = False

    def digest(self, file: Path) -> str:
        """The digest of all that the trees of `file` depend on."""
        digest = Digest()
        parts = [file_digest(file), *(file_digest(self.model / name) for name in _TOKENIZER)]
        given = [_FORMAT, dict(self.template_options), self.longest, self.pairs]
        options = json.dumps(given, sort_keys=True)
        for part in (options, *(part or "" for part in parts)):
            digest.part(part.encode())
        return digest.text()


def prepare_rows(
    file: Path,
    out: Path,
    preparation: Preparation,
    *,
    workers: int = 1,
    report: Callable[[int], None] = lambda n_rows: None,
) -> PreparedRows:
    """Make the trees of `file` in a folder within `out`, or find them there.

    `report` is called with the number of rows seen so far. Raises `UnusableRows` if the file cannot
    be read or no row of it can be trained.
    """
    try:
        folder = out / f"rows-{preparation.digest(file)}"
        return keep_rows(folder, str(file), lambda: _made(file, preparation, workers), report)
    except OSError as error:
        raise UnusableRows(f"{file}: {error.strerror or error}") from None
    except UnreadableFile as error:
        raise UnusableRows(f"{file} {error}") from None


def keep_rows(
    folder: Path,
    source: str,
    made: Callable[[], Iterator[MadeRow]],
    report: Callable[[int], None] = lambda n_rows: None,
) -> PreparedRows:
    """Write the rows of `made` to `folder`, or find them there.

    `source`: their file or run, in errors. Raises `UnusableRows` if there is none to train.
    """
    notes = folder.with_suffix(".json")
    if (known := _known(folder, notes)) is not None:
        return known
    left_out: dict[str, str] = {}
    unread: Counter[str] = Counter()
    remarks: Counter[str] = Counter()

    def trees() -> Iterator[tuple[str, TokenTree]]:
        for seen, (place, row, fields, sentences) in enumerate(made(), start=1):
            if isinstance(row, str):
                left_out[place] = row
            else:
                unread.update(fields)
                remarks.update(sentences)
                yield place, row
            report(seen)

    n_rows = write_trees(folder, trees())
    if not n_rows and not left_out:
        raise UnusableRows(f"{source}: holds no row")
    if not n_rows:
        first = next((f"; {place} {why}" for place, why in left_out.items()), "")
        raise UnusableRows(f"{source}: none of its {len(left_out)} rows can be trained{first}")
    told = {"left_out": left_out, "unread": unread, "remarks": remarks}
    notes.write_text(json.dumps(told, ensure_ascii=False, indent=1), encoding="utf-8")
    return PreparedRows(folder, left_out, unread, remarks)


def refuse_longer(tree: TokenTree, longest: int) -> None:
    """Raise `ValueError` if a path of the tree has more than `longest` tokens."""
    n_tokens = max(len(tree.places(path)) for path in tree.paths())
    if n_tokens > longest:
        raise ValueError(f"has {n_tokens} tokens, more than --max_tokens {longest}")


def _known(folder: Path, notes: Path) -> PreparedRows | None:
    """The rows that were made before; None if they were not, or not to the end."""
    try:
        TreeFile(folder)
        told = json.loads(notes.read_text(encoding="utf-8"))
        return PreparedRows(folder, told["left_out"], told["unread"], told["remarks"])
    except (OSError, ValueError, TreeFileError):
        return None
    except KeyError:  # notes of an earlier version, which had less
        return None


def _made(file: Path, preparation: Preparation, workers: int) -> Iterator[MadeRow]:
    make = partial(_make, _Maker(preparation), file)
    rows = read_rows(file)
    first = list(islice(rows, _ALONE))
    yield from map(make, first)
    if workers == 1:
        yield from map(make, rows)
        return
    # A fork has the loaded tokenizer, which takes longer to load than most files to prepare.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, fork, initializer=_hold, initargs=(make,)) as pool:
        while batch := list(islice(rows, workers * _CHUNK * 8)):
            yield from pool.map(_held_make, batch, chunksize=_CHUNK)


_held: list[Callable[[Row], MadeRow]] = []  # of a fork: what it does, which cannot be pickled


def _hold(make: Callable[[Row], MadeRow]) -> None:
    _held.append(make)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the one that wants its rows has ended, in whatever way.

    It would wait for further rows for ever: it holds the sending end of their queue itself.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "it is a fork"
    parent.join()
    os._exit(1)


def _held_make(row: Row) -> MadeRow:
    return _held[0](row)


def _make(maker: "_Maker", file: Path, row: Row) -> MadeRow:
    place = row.place_in(file)
    if row.problem is not None:
        return MadeRow(place, row.problem)
    try:
        fields, remark = without_absent(row.fields, is_table(file))
        made = maker.made(place, fields)
        return made._replace(remarks=made.remarks | {remark}) if remark else made
    except UnusableRows:
        raise  # it is not the row
    except ValueError as error:
        return MadeRow(place, str(error))


class _Maker:
    """Tokenizer and template of a model, each loaded when a row needs it."""

    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation
        self._renderer: ChatRenderer | None = None
        self._tokenizer: Any = None

    def made(self, place: str, fields: Mapping[str, Any]) -> MadeRow:
        """The row at `place` with these fields. Raises `ValueError` with one sentence."""
        remarks: set[str] = set()
        pairs = self._preparation.pairs
        answers = read_preference(fields) if pairs else (read_demonstration(fields),)
        trees = self._trees(answers, remarks)
        tree = pair_tree(*trees) if pairs else trees[0]
        unread = frozenset().union(*(shown.unread for shown in answers))
        return MadeRow(place, tree, unread, frozenset(remarks))

    def _trees(
        self, answers: Sequence[Demonstration | PlainText], remarks: set[str]
    ) -> list[TokenTree]:
        """The trees of answers to one prompt, which are conversations or texts."""
        texts = [shown for shown in answers if isinstance(shown, PlainText)]
        if texts:
            trees = plain_trees(self._plain(), texts, remarks.add)
        else:
            talks = [shown for shown in answers if isinstance(shown, Demonstration)]
            trees = [demonstrated_tree(self._chat(), shown, remarks.add) for shown in talks]
        for tree in trees:
            refuse_longer(tree, self._preparation.longest)
        return trees

    def _chat(self) -> ChatRenderer:
        if self._renderer is None:
            given = self._preparation
            try:
                self._renderer = ChatRenderer.load(given.model, given.template_options)
            except ValueError as error:
                raise UnusableRows(str(error)) from None
        return self._renderer

    def _plain(self) -> Any:
        if self._tokenizer is None:
            with importing():
                from transformers import AutoTokenizer
            self._tokenizer = AutoTokenizer.from_pretrained(str(self._preparation.model))
        return self._tokenizer
