"""The fixtures of the gateway's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `gateway_stage`, `open_session`

from gateway_stage import demo_renderer, stage  # noqa: F401
