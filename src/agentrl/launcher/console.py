"""Where commands print: texts of models, tools and web pages are among it."""

from collections.abc import Callable, Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from agentrl.foreign_text import visible

Say = Callable[[str], None]
"""Tells the user a sentence while a command goes on."""


class TerminalConsole(Console):
    """A console on which no text that is printed can move the cursor, clear or rename the window.

    Colours and cursor movements of its own are no texts, and stay.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """See `Console.render`."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
