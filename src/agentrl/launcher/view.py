"""The live view of a run: a panel in a terminal, or a line every 5 s elsewhere.

The panel is cut to the size of the terminal. The newest number of each line comes first, so that it
is never cut off.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.progress import Snapshot
from agentrl.launcher.terminal import Painter

_LINE_EVERY_S = 5.0
_PANEL_EVERY_S = 1.0
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 16
_LABEL = 17  # columns of a label, with the space after it
_BAR_FROM = 45  # inner width from which there is a progress bar
_BESIDE = 54  # inner width from which there are two columns
_VALUE = 13  # smallest width of the values of the first column
_OF_TRAINER = {
    "held-out", "evaluation", "loss", "gradient norm", "KL to sampler", "KL to reference",
    "staleness", "records waiting", "tokens/s trained", "checkpoint",
}  # fmt: skip
_NOTICES, _NOTICE_LINES = 3, 2  # number of shown notices, and lines of each


def duration(seconds: float | None) -> str:
    """Format seconds as `1:02:03` or `2:03`; None as `-`."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: tuple[float, ...], width: int = _SPARK_WIDTH) -> str:
    """Draw values between 0 and 1 as at most `width` blocks, each the mean of its values."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round(min(max(value, 0.0), 1.0) * top)] for value in means)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def plain_line(snapshot: Snapshot, seconds: float, samplers: int) -> str:
    """Format a snapshot as one line for logs, always with the same names in the same order.

    `seconds`: since the launch. `samplers`: number of living processes of this machine.
    """
    s = snapshot
    held_out = f"{s.held_out[-1].success:.3f}@{s.held_out[-1].step}" if s.held_out else "-"
    evaluating = "-"
    if (e := s.evaluating) is not None:
        evaluating = f"{e.done}/{e.rollouts}@{e.step}"
    if s.groups is not None:
        return (
            f"[{duration(seconds)}] {s.status} tasks={s.groups[0]}/{s.groups[1]}"
            f" success={_number(s.success, '.3f')} reward={_number(s.reward, '.3f')}"
            f" failed={s.attempts.failed}/{s.attempts.ended}"
            f" turns={_number(s.turns, '.1f')} tool_calls={_number(s.tool_calls, '.1f')}"
            f" sampled={_number(s.sampled_per_s, '.0f')}tok/s"
            f" services={s.services} samplers={samplers} elsewhere={s.samplers_elsewhere}"
            + _troubles(s)
        )
    return (
        f"[{duration(seconds)}] {s.status} step={s.step}/{s.max_steps or '?'}"
        f" success={_number(s.success, '.3f')} reward={_number(s.reward, '.3f')}"
        f" held-out={held_out} evaluating={evaluating}"
        f" loss={_number(s.loss, '.4g')} grad_norm={_number(s.grad_norm, '.3g')}"
        f" kl={_number(s.kl, '.3g')} reference_kl={_number(s.reference_kl, '.3g')}"
        f" failed={s.attempts.failed}/{s.attempts.ended}"
        f" turns={_number(s.turns, '.1f')} tool_calls={_number(s.tool_calls, '.1f')}"
        f" sampled={_number(s.sampled_per_s, '.0f')}tok/s"
        f" trained={_number(s.trained_per_s, '.0f')}tok/s"
        f" staleness={_number(s.staleness, '.2f')} waiting={_number(s.waiting, 'd')}"
        f" services={s.services} samplers={samplers} elsewhere={s.samplers_elsewhere}"
        f" checkpoint={_number(s.checkpoint, 'd')} left={duration(s.seconds_left)}" + _troubles(s)
    )


def _troubles(s: Snapshot) -> str:
    return (
        "".join(f" | {sentence}" for sentence in s.waiting_for)
        + (f" | failures: {s.failures}" if s.failures else "")
        + (f" | why no step: {s.why_no_step}" if s.why_no_step else "")
    )


Cell = tuple[str, str | Text]  # a name and its value


@dataclass(frozen=True)
class RunPanel:
    """A snapshot as a panel for any width and height.

    `seconds`: since the launch. `samplers`: living and expected processes of this machine.
    """

    title: str
    snapshot: Snapshot
    seconds: float
    samplers: tuple[int, int]
    notices: Sequence[str] = ()
    logs: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(1, options.max_width - 4)  # inside the frame
        notes = list(self._notes(console, width))
        room = console.size.height - 4 - len(notes)  # without frame, head and the cursor's line
        rows = self._rows(console, width)
        while len(rows) > 1 and sum(len(lines) for _, lines in rows) > room:
            rows.remove(max(rows, key=lambda row: row[0]))
        lines = [line for _, lines in rows for line in lines]
        space = [Text()] if len(lines) < room else []
        yield Panel(
            Group(self._head(width), *space, *lines, *notes),
            title=Text(self.title, "bold"),
            subtitle=self.snapshot.status,
        )

    def _head(self, width: int) -> Table:
        s = self.snapshot
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        left = f"about {duration(s.seconds_left)} left" if s.seconds_left else s.status
        what, done, total = ("step ", s.step, s.max_steps) if s.groups is None else (
            "tasks ", *s.groups)  # fmt: skip
        bar = ProgressBar(total=total or 1, completed=done if total else 0)
        head.add_row(
            Text.assemble((what, "dim"), (f"{done}", "bold"), f"/{total or '?'}"),
            bar if width > _BAR_FROM else "",
            Text.assemble((f"{duration(self.seconds)} ", "bold"), (f"· {left}", "dim")),
        )
        return head

    def _rows(self, console: Console, width: int) -> list[tuple[int, list[Text]]]:
        """The rows in order, each with a rank. The highest rank is left out first."""
        s = self.snapshot
        success = Text.assemble((_number(s.success, ".3f"), "bold green"), " ")
        sparks = min(_SPARK_WIDTH, _left(width) - _LABEL - len(success) - 1)
        success.append(sparkline(s.history, sparks), "green")
        newest, *older = [f"{e.success:.3f} @{e.step}" for e in reversed(s.held_out)] or ["-"]
        held_out = Text.assemble((newest, "bold cyan"), ("  " + "  ".join(older), "dim"))
        evaluation = "none under way"
        if (e := s.evaluating) is not None:
            evaluation = f"of step {e.step}: {e.done} of {e.rollouts} rollouts"
        staleness = _number(s.staleness, ".2f")
        if s.max_staleness is not None:
            staleness += f" (max {s.max_staleness})"
        a = s.attempts
        failed = Text(f"{a.failed} of {a.ended}", "yellow" if a.failed else "")
        alive, expected = self.samplers
        parts = f"services {s.services} · samplers {alive}/{expected}"
        if s.samplers_elsewhere:
            parts += f", elsewhere {s.samplers_elsewhere}"
        saved = "none yet" if s.checkpoint is None else f"of step {s.checkpoint}"
        rows: list[tuple[int, tuple[Cell, ...]]] = [
            (0, (("success", success), ("mean reward", _number(s.reward, ".3f")))),
            (1, (("held-out", held_out),)),
            (6, (("evaluation", evaluation),)),
            (2, (("loss", _number(s.loss, ".4g")), ("gradient norm", _number(s.grad_norm, ".3g")))),
            (3, (("KL to sampler", _number(s.kl, ".3g")), ("attempts failed", failed))),
            (4, (("KL to reference", _number(s.reference_kl, ".3g")),)),
            (8, (("staleness", staleness), ("records waiting", _number(s.waiting, "d")))),
            (
                10,
                (
                    ("turns a record", _number(s.turns, ".2f")),
                    ("calls a record", _number(s.tool_calls, ".2f")),
                ),
            ),
            (
                7,
                (
                    ("tokens/s sampled", _number(s.sampled_per_s, ",.0f")),
                    ("tokens/s trained", _number(s.trained_per_s, ",.0f")),
                ),
            ),
            (5, (("alive", parts),)),
            (11, (("checkpoint", saved),)),
        ]
        if s.groups is not None:
            cells = [(rank, [c for c in row if c[0] not in _OF_TRAINER]) for rank, row in rows]
            rows = [(rank, tuple(row)) for rank, row in cells if row]
        if s.reference_kl is None:
            rows = [row for row in rows if row[0] != 4]
        shown = [(rank, _lines(cells, width)) for rank, cells in rows]
        if self.logs:
            logs = Text(self.logs).wrap(console, max(1, width - _LABEL))
            names = ["logs", *[""] * len(logs)]
            shown.append((9, [_cell(*cell, width) for cell in zip(names, logs, strict=False)]))
        return shown

    def _notes(self, console: Console, width: int) -> Iterator[Text]:
        """Outages, why there is no step, failures and the last notices, each cut to two lines."""
        s = self.snapshot
        told = [Text(sentence, "red") for sentence in s.waiting_for]
        told += [
            Text(f"{label}: {sentence}", "red")
            for label, sentence in (("why no step", s.why_no_step), ("failures", s.failures))
            if sentence
        ]
        told += [Text(notice, "yellow") for notice in self.notices[-_NOTICES:]]
        for text in told:
            lines = text.wrap(console, width)
            if len(lines) > _NOTICE_LINES:
                lines[_NOTICE_LINES - 1].truncate(width - 2)
                lines[_NOTICE_LINES - 1].append(" …")
            yield from lines[:_NOTICE_LINES]


def _left(width: int) -> int:
    """Width of the left one of two columns."""
    return max(_LABEL + _VALUE, width // 2)


def _lines(cells: Sequence[Cell], width: int) -> list[Text]:
    """Put two cells on one line if the width suffices, else each on its own line."""
    if len(cells) == 2 and width >= _BESIDE:
        left = _left(width)
        return [_cell(*cells[0], left) + _cell(*cells[1], width - left)]
    return [_cell(*cell, width) for cell in cells]


def _cell(name: str, value: str | Text, width: int) -> Text:
    cell = Text.assemble((f"{name:<{_LABEL}}", "dim"), value)
    cell.truncate(width, overflow="ellipsis", pad=True)
    return cell


class LiveView:
    """Shows a run's snapshots and notices. A context manager, which restores the terminal."""

    def __init__(self, title: str, console: Console | None = None, logs: str = "") -> None:
        self._title = title
        self._console = console or TerminalConsole()
        self._logs = logs
        self._painter: Painter | None = None
        self._notices: list[str] = []
        self._shown_at = -_LINE_EVERY_S  # the clock may begin at 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._painter = Painter(self._console).__enter__()
        elif self._logs:
            self._print(f"logs: {self._logs}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._painter is not None:
            self._painter.__exit__(kind, error, trace)
            self._painter = None

    def notice(self, text: str) -> None:
        """Show a sentence for the user."""
        self._notices.append(text)
        if self._painter is None:
            self._print(text)
        else:
            self._shown_at = -_PANEL_EVERY_S  # at once

    def come_back(self) -> None:
        """Repaint after Ctrl-Z and `fg`, because other programs have used the terminal."""
        if self._painter is not None:
            self._painter.forget()

    def show(
        self, snapshot: Snapshot, seconds: float, samplers: tuple[int, int], *, now: bool = False
    ) -> None:
        """Show a snapshot: at most one panel a second, or one line in 5 s, unless `now`.

        `seconds`: since the launch. `samplers`: living and expected processes of this machine.
        """
        every = _LINE_EVERY_S if self._painter is None else _PANEL_EVERY_S
        resized = self._painter is not None and self._painter.resized
        if time.monotonic() - self._shown_at < every and not (now or resized):
            return
        self._shown_at = time.monotonic()
        if self._painter is not None:
            self._painter.paint(
                RunPanel(self._title, snapshot, seconds, samplers, self._notices, self._logs)
            )
        else:
            self._print(plain_line(snapshot, seconds, samplers[0]))

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
