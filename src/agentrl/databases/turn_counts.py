"""What the turns of one process come to, counted as they are stored."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from agentrl.databases.documents import DispatchedSamplingTask

# A model may call what does not exist, or nothing by name: the names told apart are limited.
_TOOLS = 64
OTHER_TOOLS, NO_TOOL = "(other)", "(none)"


@dataclass
class TurnCounts:
    """Sums over the turns that a process has stored, those of failed attempts included.

    `statuses`: turns by `TurnStatus`. `replayed`: turns that were answered from stored ones; their
    tokens do not count. `tool_calls`: by tool and "ok" or "error". `tool_seconds`: by tool.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    replayed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    generate_seconds: float = 0.0
    tool_calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    tool_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, turn: DispatchedSamplingTask) -> None:
        """Count a turn."""
        self.statuses[turn.status] += 1
        if turn.replayed is not None:
            self.replayed += 1
            return
        self.prompt_tokens += turn.prompt_len
        self.cached_tokens += turn.cached_tokens
        self.generated_tokens += len(turn.output_ids) // 4  # int32
        self.generate_seconds += turn.generate_latency_s
        for call in turn.tool_calls:
            name = call.name or NO_TOOL
            if name not in self.tool_seconds and len(self.tool_seconds) >= _TOOLS:
                name = OTHER_TOOLS
            self.tool_calls[name, "error" if call.is_error else "ok"] += 1
            self.tool_seconds[name] += call.latency_s
