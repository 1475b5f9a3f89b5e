"""The limits of a sandbox session, as values."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

OPEN_FILES = 128  # of one process
PROGRAM_BYTES = 1 << 20  # of the code given to one call
_LEAST_MEMORY_MIB = 32  # below which no interpreter starts


@dataclass(frozen=True)
class Limits:
    """What one session may use. The server has them as flags; a session may ask for less."""

    call_seconds: float = 30.0  # of a call, by the clock
    memory_mib: int = 512  # of a call's processes together, and address space of each
    processes: int = 64  # at once, threads included
    disk_mib: int = 128  # of the session's files together
    files: int = 10_000  # at once in the session's folders
    output_kib: int = 32  # of what a call printed, that are given back

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"the limit {field.name} must be greater than 0")
        if self.memory_mib < _LEAST_MEMORY_MIB:
            raise ValueError(f"the limit memory_mib must be at least {_LEAST_MEMORY_MIB}")

    def lowered(self, asked: Mapping[str, Any]) -> Self:
        """Return the limits lowered to the values in `asked`; larger values have no effect.

        Raises ValueError for an unknown name, or a value that is not a positive number.
        """
        own = asdict(self)
        for name, value in asked.items():
            if name not in own:
                raise ValueError(f"no limit is called {name!r}; there are: {', '.join(own)}")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"the limit {name} must be a number, not {value!r}")
            own[name] = min(own[name], type(own[name])(value))
        return type(self)(**own)
