"""An engine of a protocol of its own, without a network."""

from pathlib import Path
from typing import Any, ClassVar

from agentrl.inference.engine_protocol import Capabilities, Engine
from agentrl.inference.generation_builder import GenerationBuilder
from agentrl.inference.protocol import UNKNOWN_LIMITS, ModelLimits, ServiceLoad
from agentrl.policy_version import VersionSpan


class CountingEngine(Engine):
    """Counts on from the last token of the prompt; takes weights from disk only."""

    capabilities = Capabilities(frozenset({"disk"}), frozenset({"retract"}), memory=False)
    held: ClassVar[dict[str, int]] = {}  # the policy version of each service

    def __init__(self, url: str, api_key: str | None = None, **given: Any) -> None:
        self._url = url
        self.limits: ModelLimits = given.get("limits", UNKNOWN_LIMITS)

    @property
    def url(self) -> str:
        return self._url

    async def close(self) -> None: ...

    async def extend(self, building: GenerationBuilder, *, timeout_s: float = 600.0) -> None:
        asked = building.next_request()
        first, count = int(asked.input_ids[-1]) + 1, asked.sampling_params.max_new_tokens
        span = VersionSpan(self.held.get(self.url, 0), 0, count)
        building.add(range(first, first + count), [-1.0] * count, [span], cached_tokens=0)
        building.piece_ending = "length"

    async def abort(self, rid: str | None = None, *, timeout_s: float = 60.0) -> None: ...

    async def pause(self, mode: str, *, timeout_s: float = 60.0) -> None: ...

    async def continue_(self, *, timeout_s: float = 60.0) -> None: ...

    async def flush_cache(self, *, timeout_s: float = 60.0) -> None: ...

    async def alive(self, *, timeout_s: float = 5.0) -> bool:
        return True

    ready = health = alive

    async def loads(self, *, timeout_s: float = 30.0) -> ServiceLoad:
        return ServiceLoad(0, 0, 0, 1, 0)

    async def fetch_limits(self) -> ModelLimits:
        return self.limits

    async def description(self, *, timeout_s: float = 30.0) -> str:
        return "numbers"

    def at(self, url: str) -> Engine:
        return CountingEngine(url)

    async def weight_version(self, *, timeout_s: float = 30.0) -> int:
        return self.held.get(self.url, 0)

    async def update_weights_from_disk(
        self, path: str | Path, version: int, *, flush_cache: bool = True, timeout_s: float = 600.0
    ) -> None:
        self.held[self.url] = version
