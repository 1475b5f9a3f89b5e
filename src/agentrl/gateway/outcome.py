"""What the user's code of one attempt leaves behind, whether it is a command or a function."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended.

    `answer`: what it gave as its answer; None if it gave none. `error`: None if it ended well.
    `output`: what it wrote, for a person to read.
    """

    answer: str | None = None
    error: Exception | None = None
    output: str = ""
