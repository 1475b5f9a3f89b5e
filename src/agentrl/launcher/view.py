"""The live view of a run: one panel in a terminal, one line now and then anywhere else."""

import time
from itertools import pairwise
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.launcher.progress import Snapshot

_LINE_EVERY_S = 5.0
_PANEL_EVERY_S = 0.5
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 16


def duration(seconds: float | None) -> str:
    """`1:02:03` or `2:03`."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: tuple[float, ...], width: int = _SPARK_WIDTH) -> str:
    """Values between 0 and 1 as a line of blocks, averaged to at most `width` of them."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round(min(max(value, 0.0), 1.0) * top)] for value in means)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def plain_line(snapshot: Snapshot, seconds: float, samplers: int) -> str:
    """The snapshot on one line, for logs."""
    s = snapshot
    held_out = f" held-out={s.held_out[-1].success:.3f}" if s.held_out else ""
    return (
        f"[{duration(seconds)}] {s.status} step={s.step}/{s.max_steps or '?'}"
        f" success={_number(s.success, '.3f')} reward={_number(s.reward, '.3f')}{held_out}"
        f" turns={_number(s.turns, '.1f')} tool_calls={_number(s.tool_calls, '.1f')}"
        f" sampled={_number(s.sampled_per_s, '.0f')}tok/s"
        f" trained={_number(s.trained_per_s, '.0f')}tok/s"
        f" staleness={_number(s.staleness, '.2f')} waiting={_number(s.waiting, 'd')}"
        f" services={s.services} samplers={samplers} left={duration(s.seconds_left)}"
        + (f" | failures: {s.failures}" if s.failures else "")
        + (f" | why no step: {s.why_no_step}" if s.why_no_step else "")
    )


def panel(
    title: str, snapshot: Snapshot, seconds: float, samplers: tuple[int, int], notices: list[str]
) -> Panel:
    """The snapshot as a panel. `samplers`: alive and expected."""
    s = snapshot
    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    left = f"about {duration(s.seconds_left)} left" if s.seconds_left is not None else s.status
    head.add_row(
        Text.assemble(("step ", "dim"), (f"{s.step}", "bold"), f"/{s.max_steps or '?'}"),
        ProgressBar(total=s.max_steps or 1, completed=s.step if s.max_steps else 0),
        Text.assemble((f"{duration(seconds)} ", "bold"), (f"· {left}", "dim")),
    )
    body = Table.grid(padding=(0, 2), expand=True)
    for _ in range(2):
        body.add_column(style="dim", no_wrap=True)
        body.add_column(ratio=1, no_wrap=True)
    success = Text.assemble((_number(s.success, ".3f"), "bold green"), "  ")
    success.append(sparkline(s.history), "green")
    body.add_row("success", success, "mean reward", _number(s.reward, ".3f"))
    evaluations = "  ".join(f"{e.success:.3f} @{e.step}" for e in s.held_out[-4:])
    body.add_row("held-out", Text(evaluations or "-", "cyan"), "records waiting",
                 _number(s.waiting, "d"))  # fmt: skip
    body.add_row("turns per record", _number(s.turns, ".2f"),
                 "tool calls per record", _number(s.tool_calls, ".2f"))  # fmt: skip
    body.add_row("tokens/s sampled", _number(s.sampled_per_s, ",.0f"),
                 "tokens/s trained", _number(s.trained_per_s, ",.0f"))  # fmt: skip
    staleness = _number(s.staleness, ".2f")
    if s.max_staleness is not None:
        staleness += f" (max {s.max_staleness})"
    alive, expected = samplers
    body.add_row("staleness", staleness, "alive",
                 f"services {s.services}, samplers {alive}/{expected}")  # fmt: skip
    notes = [Text(f"{label}  {sentence}", "red")
             for label, sentence in (("failures", s.failures), ("why no step", s.why_no_step))
             if sentence]  # fmt: skip
    notes += [Text(notice, "yellow") for notice in notices[-3:]]
    return Panel(Group(head, Text(), body, *notes), title=f"[bold]{title}", subtitle=s.status)


class LiveView:
    """Shows snapshots as they come. A context manager, because it holds the terminal's cursor."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console()
        self._live: Live | None = None
        self._notices: list[str] = []
        self._shown_at = -_LINE_EVERY_S  # the clock may begin at 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def notice(self, text: str) -> None:
        """Something happened that a person should know."""
        self._notices.append(text)
        if self._live is None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, snapshot: Snapshot, seconds: float, samplers: tuple[int, int]) -> None:
        """The latest snapshot; `seconds` since the launch."""
        every = _LINE_EVERY_S if self._live is None else _PANEL_EVERY_S
        if time.monotonic() - self._shown_at < every:
            return
        self._shown_at = time.monotonic()
        if self._live is not None:
            view = panel(self._title, snapshot, seconds, samplers, self._notices)
            self._live.update(view, refresh=True)
        else:
            line = plain_line(snapshot, seconds, samplers[0])
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
