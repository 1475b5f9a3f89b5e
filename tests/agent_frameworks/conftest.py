"""What these tests share with those of the gateway."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))

from gateway_stage import demo_renderer, stage  # noqa: F401
