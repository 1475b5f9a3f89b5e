"""Makes the model families of `tests/rollout/chat` importable."""

import sys
from pathlib import Path

ROLLOUT = Path(__file__).parents[1]
sys.path += [str(ROLLOUT / "chat"), str(ROLLOUT / "tool_calls")]  # `families`, its `writers`
