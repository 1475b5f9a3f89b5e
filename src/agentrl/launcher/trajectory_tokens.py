"""The tokens of a Record, in the order in which they came, with all that is known of each.

Turns hold what was asked and answered; the row, if the Record became one, what is trained: mask and
advantage. The two are brought together by building the row's tree again from the turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from agentrl.databases.arrays import unpack_floats, unpack_ints
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DBRecordData, DispatchedSamplingTask, Record
from agentrl.databases.row_parts import join
from agentrl.databases.runs import load_run
from agentrl.databases.trained_logprobs import (
    trained_places,
    trainer_entropies,
    trainer_logprobs,
)
from agentrl.launcher.trajectory import read_turns
from agentrl.policy_version import VersionSpan
from agentrl.rollout.groups.row_building import replay


@dataclass(frozen=True)
class TurnTokens:
    """The tokens that a turn added: those of its prompt, and those that the model made.

    `start`: number of tokens before them in the model's context, of which the first turn of a
    segment shares `shared` with its parent. `texts`: of both, in order.
    `values`: columns of the model's own tokens, by name: `logprob`, `version`, of a row `mask` and
    `advantage`, and of a trained one, where they are kept, the trainer's logprob `trainer`, the
    `ratio` of its probability to the sampler's, and the `entropy` of the trainer's policy. Tokens
    that are not trained have none of these.
    """

    turn: int
    segment: int
    parent: str | None
    shared: int
    start: int
    prompt_ids: list[int]
    output_ids: list[int]
    prompt_texts: list[str]
    output_texts: list[str]
    values: dict[str, list[float | None]]


async def read_tokens(database: RunDatabase, record: Record) -> list[TurnTokens]:
    """The tokens of each turn of a Record."""
    turns = await read_turns(database, record.id)
    row = await read_row(database, record.id)
    return turn_tokens(turns, row, await model_folder(database))


async def read_row(database: RunDatabase, record_id: str) -> DBRecordData | None:
    """The training row of a Record, whole; None if it has none."""
    document = await database.rows.find_one({"_id": record_id})
    if document is None:
        return None
    return DBRecordData.from_mongo(await join(database, document))


async def model_folder(database: RunDatabase) -> Path | None:
    """The folder with the run's tokenizer, where it is on this machine."""
    run = await load_run(database)
    first = await database.policy_versions.find_one({}, sort=[("version", 1)])
    folders: list[str | None] = [first["path"] if first else None]
    if run is not None:
        folders += [data.model for data in reversed(run.data)]
        folders.append((run.flags or {}).get("model_name_or_path"))
    for folder in folders:
        if folder and (Path(folder) / "tokenizer.json").is_file():
            return Path(folder)
    return None


def turn_tokens(
    turns: Sequence[DispatchedSamplingTask], row: DBRecordData | None, model: Path | None
) -> list[TurnTokens]:
    """The tokens of each turn. Without the model's tokenizer, ids stand for their texts."""
    own = _values_of_row(turns, row) if row is not None else None
    found = []
    for turn in turns:
        prompt, output = unpack_ints(turn.prompt_delta_ids), unpack_ints(turn.output_ids)
        values: dict[str, list[float | None]] = {
            "logprob": _rounded(unpack_floats(turn.output_logprobs)),
            "version": _versions(turn.versions, len(output)),
        }
        if own is not None:
            values |= own[turn.turn]
        texts = _texts([*map(int, prompt), *map(int, output)], model)
        found.append(
            TurnTokens(
                turn=turn.turn,
                segment=turn.segment,
                parent=turn.parent,
                shared=turn.shared_len,
                start=turn.prompt_len - len(prompt),
                prompt_ids=prompt.tolist(),
                output_ids=output.tolist(),
                prompt_texts=texts[: len(prompt)],
                output_texts=texts[len(prompt) :],
                values=values,
            )
        )
    return found


def _rounded(values: NDArray[Any]) -> list[float | None]:
    """Numbers with six digits; None for what is not a number."""
    known = np.round(values.astype(np.float64), 6).tolist()
    return [None if value != value else value for value in known]


def _versions(spans: Sequence[VersionSpan], count: int) -> list[float | None]:
    versions: list[float | None] = []
    for span in spans:
        versions += [float(span.version)] * (span.end - span.start)
    return (versions + [-1.0] * count)[:count]


def _values_of_row(
    turns: Sequence[DispatchedSamplingTask], row: DBRecordData
) -> dict[int, dict[str, list[float | None]]] | None:
    """Mask and advantage of each turn's own tokens; None if the turns do not make up the row."""
    ends = np.cumsum([0, *(len(unpack_ints(turn.output_ids)) for turn in turns)])
    # The number of each token, counted from 1, in a column that a row does not use.
    numbered = [{"staleness": np.arange(start, end) + 1} for start, end in pairwise(ends)]
    tree = replay(turns, numbered).tree()
    if not np.array_equal(tree["ids"], row.tree["ids"]):
        return None  # of a Record that was too long, the row has a part
    place = np.zeros(ends[-1], dtype=np.int64)
    own = np.flatnonzero(tree["staleness"])
    place[tree["staleness"][own] - 1] = own
    columns: dict[str, NDArray[Any]] = {
        "mask": row.tree["mask"], "advantage": row.tree["advantages"],
    }  # fmt: skip
    known = np.zeros(len(row.tree), dtype=bool)
    known[trained_places(row.tree)] = True
    entropies = trainer_entropies(row.tree, row.trained)
    if entropies is not None:
        columns["entropy"] = np.where(known, entropies, np.nan)
    trainer = trainer_logprobs(row.tree, row.trained)
    if trainer is not None:
        columns["trainer"] = np.where(known, trainer, np.nan)
        columns["ratio"] = np.where(known, np.exp(trainer - row.tree["logprobs"]), np.nan)
    return {
        turn.turn: {name: _rounded(values[place[start:end]]) for name, values in columns.items()}
        for turn, (start, end) in zip(turns, pairwise(ends), strict=True)
    }


def _texts(ids: Sequence[int], model: Path | None) -> list[str]:
    if model is None or _tokenizer(str(model)) is None:
        return [f"[{token}]" for token in ids]
    return [_text(str(model), token) for token in ids]


@lru_cache(maxsize=50_000)
def _text(model: str, token: int) -> str:
    """A long Record has few different tokens."""
    text: str = _tokenizer(model).decode([token], skip_special_tokens=False)
    return text or f"[{token}]"


@lru_cache(maxsize=8)
def _tokenizer(folder: str) -> Any:
    file = Path(folder) / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None
