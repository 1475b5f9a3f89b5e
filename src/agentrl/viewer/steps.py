"""The trainer's figures of a run's steps: of its folder, or of its database elsewhere."""

from agentrl.databases.step_metrics import stored_metrics
from agentrl.launcher.progress import Metrics, read_metrics
from agentrl.viewer.places import Place


async def read_steps(place: Place) -> list[Metrics]:
    """The lines of all steps, in order."""
    file = place.folder / "metrics.jsonl"
    if file.is_file():
        return read_metrics(file)
    return list(await stored_metrics(place.database))
