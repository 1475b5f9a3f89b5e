"""Token trees in a folder of the disk, read one by one: supervised training's rows.

    trees.bson   the trees one after the other, as `TokenTree.pack` has them
    index.npz    of each: where it begins, its sizes, and its place in the file that it came from

A folder is written under another name and renamed when it is whole.
"""

import mmap
import os
import shutil
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

import bson
import numpy as np

from agentrl.databases.token_tree import TokenTree

_TREES, _INDEX = "trees.bson", "index.npz"
_SIZES = ("n_tokens", "n_trained", "pairs")


class TreeFileError(ValueError):
    """A folder holds no token trees. The message is one sentence."""


class TreeFile:
    """The trees of a folder, in their order.

    folder: where they are
    n_tokens, n_trained, pairs: of each tree, int64 [n]: tokens, those with mask 1, attention pairs
    """

    def __init__(self, folder: Path) -> None:
        """Raises `TreeFileError` if the folder is not one of `write_trees`."""
        self.folder = folder
        try:
            with np.load(folder / _INDEX) as index:
                self._starts = index["starts"]
                self._shared, self._places = str(index["shared"]), index["places"]
                self.n_tokens, self.n_trained, self.pairs = (index[name] for name in _SIZES)
            with (folder / _TREES).open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError, KeyError) as error:
            raise TreeFileError(f"{folder} holds no prepared rows: {error}") from None

    def __len__(self) -> int:
        return len(self._places)

    def place(self, index: int) -> str:
        """Where a tree came from, such as `rows.jsonl:3`."""
        return f"{self._shared}{self._places[index]}"

    def __getitem__(self, index: int) -> TokenTree:
        return TokenTree.unpack(
            bson.decode(self._bytes[self._starts[index] : self._starts[index + 1]])
        )


def remove_unfinished(parent: Path) -> None:
    """Remove what writers that were killed have left in `parent`. No other may be at work there."""
    for partial in parent.glob("*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def write_trees(folder: Path, trees: Iterable[tuple[str, TokenTree]]) -> int:
    """Write trees, each with its place, to a new folder; returns how many there are.

    `trees` is consumed one by one. Without a tree no folder is made.
    """
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    places: list[str] = []
    starts = [0]
    sizes: list[tuple[int, int, int]] = []
    try:
        with (partial / _TREES).open("wb") as file:
            for place, tree in trees:
                starts.append(starts[-1] + file.write(bson.encode(tree.pack())))
                places.append(place)
                sizes.append((len(tree), int(tree["mask"].sum()), tree.pairs))
        if not places:
            return 0
        columns = dict(zip(_SIZES, np.array(sizes, dtype=np.int64).T, strict=True))
        # What all places begin with, a file's name, is stored once: numpy's texts have one width.
        shared = _shared(min(places), max(places))
        rests = np.array([place[len(shared) :] for place in places])
        np.savez(
            partial / _INDEX, starts=np.array(starts), shared=np.array(shared), places=rests,
            **columns,
        )  # fmt: skip
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return len(places)


def _shared(first: str, last: str) -> str:
    """What two texts begin with, and so all texts that are sorted between them."""
    both = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(letter for letter, _ in both)
