"""Runs pip or uv with one line of progress; the full output goes to a log file.

    python scripts/installing.py LOG COMMAND [ARGUMENT ...]

A terminal shows one changing line; otherwise a line is printed every 30 s. The exit status is the
command's; after a failure the reason and the log's path are printed. Only the standard library is
used, because nothing else is installed yet.
"""

import os
import re
import selectors
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_LINE_EVERY_S = 30.0  # where there is no terminal
_PAINT_EVERY_S = 0.5
_ERROR_LINES = 5
_NO_INDEX = re.compile(
    r"name resolution|NewConnectionError|Network is unreachable|ConnectTimeout|Connection refused"
    r"|error sending request|dns error|ProxyError|failed to lookup address",
    re.IGNORECASE,
)
_NOISE = re.compile(r"WARNING: |\[notice\]|Requirement already satisfied|\s*$")


class Progress:
    """The progress of an installer, parsed from its output."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.total: int | None = None  # packages to be installed, once that is known
        self.installing = False
        self._file = self._bytes = ""

    def take(self, line: str) -> None:
        """Parse one line of pip's or uv's output."""
        if match := re.match(r"Collecting ([\w.-]+)", line):
            self.found.add(match[1].lower())
            self._file = self._bytes = ""
        elif match := re.match(r"\s*Downloading (\S+?) \(([\d.]+ ?\w+)\)", line):
            if ".metadata" not in match[1]:
                self._file, self._bytes = "-".join(match[1].split("-")[:2]), match[2]
        elif match := re.match(r"Progress (\d+) of (\d+)", line):
            done, size = (int(number) / 1e6 for number in match.groups())
            self._bytes = f"{done:.0f} of {size:.0f} MB"
        elif match := re.match(r"Resolved (\d+) packages?", line):  # uv
            self.total = int(match[1])
        elif match := re.match(r"Prepared (\d+) packages?", line):  # uv
            self.total, self.installing = int(match[1]), True
        elif match := re.match(r"Installing collected packages: (.*)", line):
            self.total, self.installing = match[1].count(",") + 1, True

    def text(self, seconds: float, installed: int) -> str:
        """The progress line. `installed`: number of packages added to the environment."""
        if self.installing:
            done = min(max(installed, 0), self.total or 0)
            what = f"installing packages, {done} of {self.total}"
        elif self.total is not None:
            what = f"downloading {self.total} packages"
        else:
            what = f"looking for packages, {len(self.found)} found"
        if self._file and not self.installing:
            what += f", now {self._file} ({self._bytes})"
        return f"setup: {what}, {int(seconds) // 60}:{int(seconds) % 60:02}"


class Line:
    """One line on standard error, which is overwritten in a terminal."""

    def __init__(self) -> None:
        self._moves = sys.stderr.isatty()
        self._shown = time.monotonic()

    def show(self, text: str) -> None:
        """Show the text, unless the last one is too recent."""
        every = _PAINT_EVERY_S if self._moves else _LINE_EVERY_S
        if time.monotonic() - self._shown < every:
            return
        self._shown = time.monotonic()
        if self._moves:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line from a terminal."""
        if self._moves:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def run(log: Path, command: list[str]) -> tuple[int, list[str]]:
    """Run the command. Returns its exit status and its output lines."""
    progress, line, began = Progress(), Line(), time.monotonic()
    before, last = count_installed(), [""]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()
    )
    assert process.stdout is not None
    rest = b""
    try:
        with log.open("ab") as file, selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                if selector.select(_PAINT_EVERY_S):
                    data = os.read(process.stdout.fileno(), 65536)
                    if not data:
                        break
                    *lines, rest = (rest + data).split(b"\n")
                    for raw in lines:
                        text = raw.decode(errors="replace").rstrip()
                        progress.take(text)
                        if not text.startswith("Progress "):
                            file.write(raw + b"\n")
                            last.append(text)
                    file.flush()
                installed = count_installed() - before if progress.installing else 0
                line.show(progress.text(time.monotonic() - began, installed))
            file.write(rest)
        return process.wait(), last
    except KeyboardInterrupt:  # the installer got it too
        process.wait()
        return 130, last
    finally:
        line.clear()


def environment() -> dict[str, str]:
    """Our environment, with raw progress output if pip supports it."""
    try:
        major, minor = (int(part) for part in version("pip").split(".")[:2])
    except PackageNotFoundError:
        return {**os.environ}
    raw = {"PIP_PROGRESS_BAR": "raw"} if (major, minor) >= (24, 1) else {}
    return {**raw, **os.environ, "PYTHONUNBUFFERED": "1"}


def count_installed() -> int:
    """Number of packages in this environment."""
    return sum(1 for _ in Path(sysconfig.get_path("purelib")).glob("*.dist-info"))


def why(lines: list[str]) -> list[str]:
    """The message for a failure of pip: the last lines of the error, then a sentence."""
    if any(_NO_INDEX.search(line) for line in lines):
        return [
            "setup: pip failed: it cannot reach the package index. Connect this machine, or "
            "name a mirror (PIP_INDEX_URL), and run the same command again"
        ]
    error = [line for line in lines if not _NOISE.match(line)][-_ERROR_LINES:]
    return [*error, "setup: pip failed, see above; run the same command again to retry"]


def main() -> int:
    """Run the command of the arguments. Returns the exit status."""
    log, command = Path(sys.argv[1]), sys.argv[2:]
    status, lines = run(log, command)
    if status == 130:
        print("setup: interrupted; the same command begins it again", file=sys.stderr)
    elif status and Path(command[0]).name == "uv":
        print(f"setup: uv failed, going on with pip (all uv said: {log})", file=sys.stderr)
    elif status:
        *error, sentence = why(lines)
        print(*error, f"{sentence} (all it said: {log})", sep="\n", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
