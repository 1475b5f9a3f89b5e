"""What a check is given: the machine that it runs on, and where its figures go. Without torch."""

import json
from dataclasses import dataclass
from pathlib import Path

Figure = float | int | str | None


class CheckFailed(Exception):
    """What a check found wrong, in one sentence."""


class NotHere(Exception):
    """What this machine lacks for a check, which is skipped."""


@dataclass(frozen=True)
class Machine:
    """Where a check runs.

    kind: cuda, or cpu for the stand-in
    gpus: how many there are
    folder: empty, for files of the check
    """

    kind: str
    gpus: int
    folder: Path

    @property
    def on_gpu(self) -> bool:
        """Whether this is no stand-in."""
        return self.kind == "cuda"


class Figures:
    """The figures of a check, written as they come."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._figures: dict[str, Figure] = {}

    def add(self, **figures: Figure) -> None:
        """Add figures by name."""
        self._figures |= figures
        self._write({"figures": self._figures})

    def end(self, status: str, error: str | None = None) -> None:
        """The check has ended, ok, failed or skipped; `error`: why."""
        self._write({"figures": self._figures, "status": status, "error": error})

    def _write(self, outcome: dict[str, object]) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(outcome))
        part.rename(self._file)  # the process may be killed at any time


def require(condition: bool, otherwise: str) -> None:
    """Raise `CheckFailed` with the sentence `otherwise` unless the condition holds."""
    if not condition:
        raise CheckFailed(otherwise)
