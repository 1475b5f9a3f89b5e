"""Finds published tensors that a service leaves out though it answers success.

SGLang skips what its model has no name for. Before its first publication a service therefore gets
one tensor of each kind with values that it cannot have, and the checksums of its weights must
change. It counts as never updated until the publication itself, which restores all values.

A service fuses tensors and has names of its own, but numbers layers like the folder. So each tensor
of a round is of another layer, and a changed checksum in that layer shows that it was taken.
"""

import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from agentrl.inference.engine_protocol import Engine, WeightWay
from agentrl.inference.protocol import FRESH_VERSION, InferenceError, RequestRejected
from agentrl.inference.weights.buckets import module_of
from agentrl.inference.weights.updates import PublishedWeights, UpdateFailed, WeightUpdater

_NUMBER = re.compile(r"\.(\d+)(?=\.)")


class CheckedUpdater:
    """An updater that checks each service at its first update.

    skipped: the tensors that services left out, by their URLs. Their updates have failed.
    """

    def __init__(self, updater: WeightUpdater) -> None:
        self.way: WeightWay = updater.way
        self.skipped: dict[str, list[str]] = {}
        self._updater = updater
        self._checked: set[str] = set()

    async def load(self, engine: Engine, weights: PublishedWeights, *, flush_cache: bool) -> None:
        """See `WeightUpdater`."""
        if engine.url in self._checked:
            await self._updater.load(engine, weights, flush_cache=flush_cache)
            return
        try:
            skipped = await skipped_tensors(self._updater, engine, weights)
            if not skipped:
                await self._updater.load(engine, weights, flush_cache=flush_cache)
        except InferenceError as error:
            # SGLang also refuses when the weights are in and only its cache is not flushed.
            if isinstance(error, RequestRejected) and await _has(engine, weights):
                raise
            raise UpdateFailed(str(error), mixed=True) from error
        if skipped:
            self.skipped[engine.url] = skipped
            raise UpdateFailed(f"{engine.url} leaves out {', '.join(skipped)}", mixed=True)
        self._checked.add(engine.url)

    async def close(self) -> None:
        """See `WeightUpdater`."""
        await self._updater.close()


async def skipped_tensors(
    updater: WeightUpdater, engine: Engine, weights: PublishedWeights
) -> list[str]:
    """The tensors that a paused service does not take, of one for each kind that is published.

    Empty if it takes all, or if it has no checksums, as an engine that refuses what it does not
    know. It has wrong weights afterwards. Raises InferenceError if it fails.
    """
    try:
        before = await engine.weight_checksums()
    except RequestRejected:
        return []
    skipped: list[str] = []
    for names in plan_rounds(weights.tensors):
        other = {name: -weights.tensors[name] - 1 for name in names}
        await _send(updater, engine, weights, other)
        after = await engine.weight_checksums()
        silent = _unchanged(names, before, after)
        if silent:
            # Once more with the module that they belong to: a service may need all of it to fuse
            # some, and an earlier trainer may have left these very values.
            modules = {module_of(name) for name in silent}
            near = {n: t for n, t in weights.tensors.items() if module_of(n) in modules}
            await _send(updater, engine, weights, near)
            before = await engine.weight_checksums()
            await _send(updater, engine, weights, near | {name: other[name] for name in silent})
            after = await engine.weight_checksums()
            skipped += _unchanged(silent, before, after)
        before = after
    return skipped


def plan_rounds(names: Iterable[str]) -> list[list[str]]:
    """One tensor of each kind, in rounds that have at most one of each layer. Pure.

    Tensors whose names differ in numbers only are of one kind.
    """
    kinds: dict[str, dict[int | None, str]] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub(".*", name), {}).setdefault(layer(name), name)
    rounds: list[dict[int | None, str]] = []
    # Kinds that few layers have come first, because the others have a choice.
    for places in sorted(kinds.values(), key=len):
        for held in rounds:
            free = [number for number in places if number not in held]
            if free:
                held[free[0]] = places[free[0]]
                break
        else:
            number = next(iter(places))
            rounds.append({number: places[number]})
    return [list(held.values()) for held in rounds]


def layer(name: str) -> int | None:
    """The number of the layer that a tensor belongs to; None if it belongs to none."""
    match = _NUMBER.search(name)
    return int(match[1]) if match else None


async def _has(engine: Engine, weights: PublishedWeights) -> bool:
    return await engine.weight_version() == weights.version


def _unchanged(
    names: Sequence[str], before: Mapping[str, str], after: Mapping[str, str]
) -> list[str]:
    """Those of `names` in whose layer no checksum has changed."""
    changed = {layer(name) for name in after if after[name] != before.get(name)}
    return [name for name in names if layer(name) not in changed]


async def _send(
    updater: WeightUpdater,
    engine: Engine,
    weights: PublishedWeights,
    tensors: Mapping[str, Tensor],
) -> None:
    """Load a few tensors, by the same way as all."""
    if updater.way != "disk":
        probe = PublishedWeights(FRESH_VERSION, weights.folder, tensors)
        await updater.load(engine, probe, flush_cache=False)
        return
    with _folder_of(tensors, weights.folder.parent) as folder:
        await updater.load(engine, PublishedWeights(FRESH_VERSION, folder), flush_cache=False)


@contextmanager
def _folder_of(tensors: Mapping[str, Tensor], parent: Path) -> Iterator[Path]:
    """A folder with a file of `tensors`, which is removed when the block ends."""
    folder = parent / f"probe-{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    try:
        file = folder / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        file.chmod(folder.stat().st_mode & 0o666)  # safetensors lets only its owner read it
        yield folder
    finally:
        shutil.rmtree(folder)
