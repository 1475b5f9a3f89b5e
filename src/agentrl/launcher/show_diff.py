"""`agentrl show RUN --diff A B`: two Records of a task side by side, from where they part."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile, zip_longest
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agentrl.configs import ConfigError
from agentrl.databases.conversation import Said, conversation
from agentrl.databases.documents import DispatchedSamplingTask, Record
from agentrl.launcher.show_list import number
from agentrl.launcher.trajectory import record_json
from agentrl.launcher.trajectory_tokens import TurnTokens

_SHARED_SHOWN = 60  # characters of the start that two texts share


@dataclass(frozen=True)
class Parting:
    """The first token in which two Records differ. `same`: number of tokens before it, in both.

    `tokens`: of each Record; None where it ended.
    """

    same: int
    tokens: list[dict[str, Any] | None]


@dataclass(frozen=True)
class Diff:
    """Two Records. `same`: number of parts that both begin with. `after`: what follows, of each.

    `parting`: None if one of them has no tokens, or if all are equal.
    """

    records: tuple[Record, Record]
    same: int
    common: list[Said]
    after: tuple[list[Said], list[Said]]
    parting: Parting | None

    def json(self) -> dict[str, Any]:
        """The difference as JSON has it."""
        return {
            "records": [record_json(record) for record in self.records],
            "same": self.same,
            "common": [asdict(said) for said in self.common],
            "after": [[asdict(said) for said in side] for side in self.after],
            "parting": None if self.parting is None else asdict(self.parting),
        }


Side = tuple[Record, Sequence[DispatchedSamplingTask], Sequence[TurnTokens]]


def diff(first: Side, second: Side) -> Diff:
    """Compare two Records. Raises `ConfigError` if they are of different tasks."""
    one, other = first[0], second[0]
    if one.task_id != other.task_id:
        raise ConfigError(
            f"--diff {one.id} {other.id}: they are of the tasks {one.task_id!r} and "
            f"{other.task_id!r}; give two records of one task"
        )
    ours, theirs = conversation(first[1]), conversation(second[1])
    same = sum(1 for _ in takewhile(_equal, zip(ours, theirs, strict=False)))
    return Diff(
        records=(one, other),
        same=same,
        common=ours[:same],
        after=(ours[same:], theirs[same:]),
        parting=_parting(first[2], second[2]),
    )


def _equal(pair: tuple[Said, Said]) -> bool:
    return pair[0] == pair[1]


def _parting(ours: Sequence[TurnTokens], theirs: Sequence[TurnTokens]) -> Parting | None:
    first, second = _tokens(ours), _tokens(theirs)
    if not first or not second:
        return None
    pairs = zip(first, second, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0]["id"] == pair[1]["id"], pairs))
    if same == len(first) == len(second):
        return None
    return Parting(same, [side[same] if same < len(side) else None for side in (first, second)])


def _tokens(turns: Sequence[TurnTokens]) -> list[dict[str, Any]]:
    """All tokens in the order in which they came."""
    found: list[dict[str, Any]] = []
    for turn in turns:
        for token, text in zip(turn.prompt_ids, turn.prompt_texts, strict=True):
            found.append({"turn": turn.turn, "id": token, "text": text})
        for at, (token, text) in enumerate(zip(turn.output_ids, turn.output_texts, strict=True)):
            values = {name: own[at] for name, own in turn.values.items()}
            found.append({"turn": turn.turn, "id": token, "text": text, **values})
    return found


def print_diff(console: Console, found: Diff) -> None:
    """Print facts and scores of both, what they share in one line, and what follows in columns."""
    console.print(_facts(found.records))
    turns = len({said.turn for said in found.common if said.role == "assistant"})
    told = f"the same up to here: {found.same} parts, {turns} turns of the model"
    console.print(Rule(told, align="left", style="dim"))
    if found.parting is not None:
        said = [_token(token) for token in found.parting.tokens]
        console.print(
            Text(f"after {found.parting.same} equal tokens: {said[0]} against {said[1]}", "dim")
        )
    if not any(found.after):
        console.print("nothing differs")
        return
    table = Table(show_header=True, show_lines=True, expand=True)
    for record in found.records:
        table.add_column(record.id, ratio=1, overflow="fold")
    for ours, theirs in zip_longest(*found.after):
        table.add_row(_cell(ours, theirs), _cell(theirs, ours))
    console.print(table)


def _facts(records: tuple[Record, Record]) -> Table:
    """Both Records' figures, a column each. What differs is bold."""
    scorers = list(dict.fromkeys(name for record in records for name in record.scores))
    explained = [name for name in scorers if any(name in r.explanations for r in records)]
    rows: list[tuple[str, list[str]]] = [
        ("epoch, rollout", [f"{r.split} {r.epoch}, {r.rollout}" for r in records]),
        ("score", [number(r.score, "g") for r in records]),
        ("advantage", [number(r.advantage, "+.3f") for r in records]),
        ("answer", [str(r.final_answer) for r in records]),
        ("stop", [str(r.stop_reason or r.status) for r in records]),
        ("turns, calls", [f"{r.n_turns}, {r.n_tool_calls}" for r in records]),
        ("tokens generated", [str(r.tokens.generated) for r in records]),
        (
            "policy versions",
            [f"{r.versions.min} to {r.versions.max}" if r.versions else "-" for r in records],
        ),
        *((name, [number(r.scores.get(name), "g") for r in records]) for name in scorers),
        *((f"{name} says", [r.explanations.get(name, "-") for r in records]) for name in explained),
    ]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", style="dim")
    for record in records:
        table.add_column(record.id, overflow="fold")
    for name, values in rows:
        style = "" if values[0] == values[1] else "bold"
        table.add_row(name, *(Text(value, style) for value in values))
    return table


def _cell(own: Said | None, other: Said | None) -> Text:
    """A part, with the start that it shares with the other's dimmed and shortened."""
    if own is None:
        return Text("(it had ended)", "dim")
    head = (f"turn {own.turn} · {own.role}\n", "dim")
    if other is None or own.role != other.role:
        return Text.assemble(head, own.text)
    if own.text == other.text:
        return Text.assemble(head, (own.text, "dim"))
    same = sum(
        1 for _ in takewhile(lambda p: p[0] == p[1], zip(own.text, other.text, strict=False))
    )
    shared = own.text[:same]
    if same > _SHARED_SHOWN:
        shared = f"… {shared[-_SHARED_SHOWN:]}"
    return Text.assemble(head, (shared, "dim"), own.text[same:])


def _token(token: dict[str, Any] | None) -> str:
    if token is None:
        return "the end"
    logprob = f", logprob {token['logprob']:.3f}" if "logprob" in token else ""
    return f"{token['text']!r} (id {token['id']}{logprob})"
