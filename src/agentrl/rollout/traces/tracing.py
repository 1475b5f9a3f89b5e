"""Whether a sampler traces its Records, and where."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from agentrl.configs import Config
from agentrl.rollout.llm.models import AgentModel
from agentrl.rollout.traces.ended import EndedRecord


class Tracing(Protocol):
    """Where ended Records are traced."""

    def wants(self, record: str) -> bool:
        """Whether the Record of this id is traced."""

    def put(self, ended: EndedRecord) -> None:
        """Trace a Record that is wanted. Never waits."""


@asynccontextmanager
async def open_tracing(
    config: Config, run: str, endpoint: AgentModel | None = None
) -> AsyncIterator[Tracing | None]:
    """None without `--otlp_endpoint`. `endpoint`: the model that is asked instead of the run's."""
    if config.run.otlp_endpoint is None:
        yield None
        return
    # Imported here: their package is optional.
    from agentrl.rollout.traces.export import Traces
    from agentrl.rollout.traces.spans import Spans

    model = config.model.model_name_or_path if endpoint is None else endpoint.model
    async with Traces.open(config.run, Spans(run, Path(model or "").name)) as traces:
        yield traces
