"""The trainer's figures of a run's steps: of its folder, or of its database elsewhere."""

from collections.abc import Sequence

from agentrl.databases.step_metrics import stored_metrics
from agentrl.launcher.progress import Metrics
from agentrl.viewer.places import Place


async def read_steps(place: Place) -> Sequence[Metrics]:
    """The lines of all steps, in order."""
    if (place.folder / "metrics.jsonl").is_file():
        place.metrics.read()
        return list(place.metrics.recent)
    return await place.kept.get("steps", lambda: stored_metrics(place.database))


def thinned(lines: Sequence[Metrics], most: int) -> list[Metrics]:
    """At most so many of the lines, which lie evenly; the last one is among them."""
    if len(lines) <= most:
        return list(lines)
    last = len(lines) - 1
    return [lines[last * number // (most - 1)] for number in range(most)]
