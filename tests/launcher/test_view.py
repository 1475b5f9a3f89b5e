"""What the live view shows at any size of a terminal, and how it stays in its place there."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from rich.text import Text

from agentrl.databases.attempt_tally import AttemptCounts
from agentrl.databases.success import Evaluating, HeldOut
from agentrl.launcher.progress import Snapshot
from agentrl.launcher.terminal import Painter
from agentrl.launcher.view import LiveView, RunPanel, duration, plain_line, sparkline

FULL = Snapshot(
    status="training", step=23, max_steps=60, success=0.71, reward=0.705, turns=2.64,
    tool_calls=2.1, sampled_per_s=1900, trained_per_s=1200, staleness=0.8, max_staleness=2,
    attempts=AttemptCounts(256, 3, ((3, "KeyError: 'x'"),)), loss=-0.32341, grad_norm=0.417,
    kl=0.000211, waiting=40, services=1,
    samplers_elsewhere=2, checkpoint=20, seconds_left=75, history=(0.3, 0.5, 0.7),
    held_out=tuple(HeldOut(step, 100, 40 + step, 0.5) for step in range(0, 50, 5)),
    evaluating=Evaluating(step=50, done=123, rollouts=512),
)  # fmt: skip
NEWEST = (
    "23/60", "1:05", "1:15 left", "0.710", "0.705", "0.850 @45", "of step 50: 123 of 512",
    "-0.3234", "0.417", "0.000211", "3 of 256", "0.80 (max 2)", " 40 ", "1,900", "1,200",
    "samplers 1/2", "elsewhere 2", "logs/as/demo_*.log", "sampler-0 was ended",
)  # fmt: skip


def shown(panel: RunPanel, width: int, height: int) -> list[str]:
    """The panel's lines in a terminal of this size."""
    out = io.StringIO()
    Console(file=out, width=width, height=height).print(panel)
    return out.getvalue().splitlines()


def panel_of(snapshot: Snapshot, notices: tuple[str, ...] = ()) -> RunPanel:
    logs = "logs/as/demo_*.log (serve, train_0, sample-0, mongo)"
    return RunPanel("demo · GRPO", snapshot, 65, (1, 2), notices, logs)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (60, 20), (200, 60)])
def test_the_newest_number_of_everything_is_shown_at_any_usual_size(
    width: int, height: int
) -> None:
    lines = shown(panel_of(FULL, ("sampler-0 was ended by SIGKILL: it is started again",)),
                  width, height)  # fmt: skip
    assert len(lines) < height and all(len(line) == width for line in lines)
    text = "\n".join(lines)
    for words in NEWEST:
        assert words in text, words
    without = shown(panel_of(replace(FULL, reference_kl=0.034)), width, height)
    assert "KL to reference" in "".join(without) and "0.034" in "".join(without)


def test_what_is_waited_for_is_said_in_the_panel_and_on_the_line() -> None:
    waits = "waiting for the tool server sql since 02:10:05 (35 s), last error: refused"
    snapshot = replace(FULL, waiting_for=(waits,))
    assert waits in " ".join("".join(shown(panel_of(snapshot), 100, 30)).split())
    assert plain_line(snapshot, 0, 1).endswith(f" | {waits}")


@pytest.mark.parametrize(("width", "height"), [(40, 12), (30, 24), (12, 5), (80, 6)])
def test_a_small_terminal_gets_what_matters_most_and_no_more_than_it_has_room_for(
    width: int, height: int
) -> None:
    wordy = "错误 the agent raised KeyError: 'messages' in step 3 of its loop " * 5
    lines = shown(panel_of(FULL, (wordy,)), width, height)
    assert all(Text(line).cell_len == width for line in lines)
    if width >= 30:
        assert len(lines) < max(height, 7) and "0.710" in "\n".join(lines)


def test_what_is_not_known_yet_is_a_dash() -> None:
    text = "\n".join(shown(panel_of(Snapshot()), 80, 24))
    assert "None" not in text and "step 0/?" in text and "starting" in text
    assert re.search(r"loss +- +gradient norm +-", text)


def test_without_a_terminal_the_view_is_a_line_now_and_then() -> None:
    out = io.StringIO()
    with LiveView("demo", Console(file=out, width=40), "logs/as/demo_*.log") as view:
        for _ in range(50):
            view.show(FULL, 65, (1, 1))
        view.notice("sampler-0 died")
    logs, *said = out.getvalue().splitlines()
    assert logs == "logs: logs/as/demo_*.log"
    assert said == [plain_line(FULL, 65, 1), "sampler-0 died"]
    for words in (
        "step=23/60 success=0.710 reward=0.705 held-out=0.850@45 evaluating=123/512@50 loss=-0.3234"
        " grad_norm=0.417 kl=0.000211", "failed=3/256", "samplers=1 elsewhere=2 checkpoint=20",
    ):  # fmt: skip
        assert words in out.getvalue()
    assert re.findall(r" ([\w-]+)=", plain_line(FULL, 65, 1)) == re.findall(
        r" ([\w-]+)=", plain_line(Snapshot(), 0, 0)
    )


def test_durations_and_sparklines_by_hand() -> None:
    assert [duration(s) for s in (None, 0, 65, 3661)] == ["-", "0:00", "1:05", "1:01:01"]
    assert sparkline((0.0, 0.5, 1.0)) == "▁▅█"
    assert sparkline((0.0, 1.0) * 50, width=50) == "▅" * 50
    assert sparkline(()) == ""


class Terminal(io.StringIO):
    """As much of a terminal as a Painter uses: writes are carried out, styles left out."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__()
        self.size = width, height
        self.lines = [""]
        self.row = self.column = 0
        self.written = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written += len(text)
        for number, code, plain in re.findall(r"\x1b\[\??(\d*)[;\d]*([A-Za-z])|([^\x1b])", text):
            if plain == "\r":
                self.column = 0
            elif plain == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif plain:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + plain + line[self.column + 1 :]
                self.column += 1
            elif code == "A":
                self.row = max(0, self.row - int(number))
            elif code == "B":
                self.row += int(number)
            elif code == "H":
                self.row = self.column = 0
            elif code == "K":
                self.lines[self.row] = ""
            elif code == "J":
                below = "" if number == "2" else self.lines[self.row][: self.column]
                self.lines[0 if number == "2" else self.row :] = [below]
        return len(text)


def test_a_picture_stays_in_its_place_and_only_changed_lines_are_written() -> None:
    terminal = Terminal(20, 10)
    console = Console(file=terminal, width=20, height=10, force_terminal=True)
    console.print("before")
    with Painter(console) as painter:
        for picture in ("one\ntwo\nthree", "one\n2\nthree", "one", "a\nb\nc\nd"):
            painter.paint(picture)
            assert [line.rstrip() for line in terminal.lines] == ["before", *picture.split("\n")]
        written = terminal.written
        painter.paint("a\nb\nc\nd")
        assert terminal.written == written, "nothing changed, nothing is written"
        painter.paint("a\nb\nX\nd")
        assert terminal.written - written < 60
        console.size = (12, 8)  # the terminal has wrapped and moved what was there
        terminal.lines, terminal.row = ["befo", "re", "a   ", "  "], 3
        assert painter.resized
        painter.paint("a\nb")
        assert terminal.lines == ["a", "b"] and not painter.resized
        terminal.write("\n$ fg\n")
        painter.forget()
        painter.paint("a\nc")
        assert terminal.lines[-2:] == ["a", "c"]
        painter.paint("\n".join("abcdefghijkl"))
        assert len(terminal.lines) <= 8 + 4, "what does not fit is left out"
    assert terminal.lines[-1] == "", "what follows begins on a line of its own"


def test_a_run_without_a_trainer_shows_its_tasks_and_nothing_of_training() -> None:
    sampling = replace(FULL, status="sampling", groups=(12, 64), held_out=(), evaluating=None)
    line = plain_line(sampling, 65, 2)
    assert line.startswith("[1:05] sampling tasks=12/64 success=0.710")
    assert not re.search(r"step=|loss=|held-out=|checkpoint=|trained=", line)
    text = "\n".join(shown(panel_of(sampling), 100, 40))
    assert "tasks 12/64" in text and "1,900" in text
    for word in ("loss", "held-out", "staleness", "checkpoint", "trained", "KL"):
        assert word not in text
