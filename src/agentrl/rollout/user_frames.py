"""Where code of a user's stands: in a thread, or in what a task awaits."""

import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

_OURS = Path(__file__).parents[1]  # agentrl
_STANDARD = Path(sysconfig.get_path("stdlib"))


def place(frames: Iterable[FrameType]) -> str | None:
    """The innermost of the frames that is a user's, as function, file and line. The frames: the
    outermost first."""
    of_users = [frame for frame in frames if _is_users(Path(frame.f_code.co_filename))]
    if not of_users:
        return None
    code = of_users[-1].f_code
    return f"{code.co_name}, {code.co_filename}:{of_users[-1].f_lineno}"


def place_in_thread(ident: int | None) -> str | None:
    """The `place` in the thread's stack; None also if the thread is not running."""
    frame = sys._current_frames().get(ident or 0)
    if frame is None:
        return None
    called = [frame for frame, _ in traceback.walk_stack(frame)]
    return place(reversed(called))


def _is_users(file: Path) -> bool:
    if file.is_relative_to(_OURS) or not file.is_absolute():  # <frozen ...>, and C
        return False
    of_python = file.is_relative_to(_STANDARD) and "site-packages" not in file.parts
    return not of_python and "uvloop" not in file.parts
