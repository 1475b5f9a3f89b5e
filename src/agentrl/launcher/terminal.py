"""Repaints a picture in place in a terminal.

Unlike `rich.live` it writes only the lines that changed, in one write, so that nothing flickers.
After a resize, which wraps the old lines, the whole picture is repainted. Typed characters, such as
the ^C of Ctrl-C, do not move it.
"""

import os
import sys
import termios
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType

_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_CLEAR_SCREEN, _CLEAR_BELOW, _CLEAR_LINE = "\x1b[H\x1b[2J", "\r\x1b[J", "\r\x1b[2K"
# Terminals that support these show the output in between at once; others ignore them.
_BEGIN_UPDATE, _END_UPDATE = "\x1b[?2026h", "\x1b[?2026l"
_LOCAL_MODES = 3  # of what tcgetattr returns


class Painter:
    """Paints one picture after the other in the same place.

    A context manager, which restores the terminal at the end. The last picture stays.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: list[str] = []
        self._size = console.size
        self._modes: list[int | list[bytes | int]] | None = None

    def __enter__(self) -> Self:
        self._silence_keys()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._write(("\n" if self._lines else "") + _SHOW_CURSOR)
        if self._modes is not None and _in_foreground():
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._modes)

    @property
    def resized(self) -> bool:
        """Whether the terminal was resized since the last picture."""
        return self._console.size != self._size

    def forget(self) -> None:
        """Paint the next picture completely, below other programs' output in the terminal."""
        self._lines = []
        self._silence_keys()

    def paint(self, picture: RenderableType) -> None:
        """Replace the last picture by this one."""
        with self._console.capture() as capture:
            self._console.print(picture)
        # The cursor needs one more line.
        lines = capture.get().rstrip("\n").split("\n")[: max(1, self._console.size.height - 1)]
        if self.resized:
            self._size = self._console.size
            self._write(_HIDE_CURSOR + _CLEAR_SCREEN + "\n".join(lines))
        elif len(lines) != len(self._lines):
            up = _up(len(self._lines) - 1)
            self._write(_HIDE_CURSOR + up + _CLEAR_BELOW + "\n".join(lines))
        else:
            changed = [
                (len(lines) - 1 - place, line)
                for place, (line, before) in enumerate(zip(lines, self._lines, strict=True))
                if line != before
            ]
            self._write("".join(f"{_up(n)}{_CLEAR_LINE}{line}{_down(n)}" for n, line in changed))
        self._lines = lines

    def _write(self, text: str) -> None:
        if text:
            self._console.file.write(_BEGIN_UPDATE + text + _END_UPDATE)
            self._console.file.flush()

    def _silence_keys(self) -> None:
        """Turn off the terminal's echo. Ctrl-C and the like still send signals."""
        if not _in_foreground():
            return
        modes = termios.tcgetattr(sys.stdin)
        self._modes = self._modes or modes
        silent = list(modes)
        silent[_LOCAL_MODES] &= ~termios.ECHO
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)


def _in_foreground() -> bool:
    """Whether we are in the foreground. A background process that changes modes is stopped."""
    return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()


def _up(lines: int) -> str:
    return f"\x1b[{lines}A" if lines > 0 else ""


def _down(lines: int) -> str:
    return f"\x1b[{lines}B" if lines > 0 else ""
