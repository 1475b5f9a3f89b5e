"""Makes `families`, and the parsers' `writers`, importable; the fuzz program imports them too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tool_calls"))
