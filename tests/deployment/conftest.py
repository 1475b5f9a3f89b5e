"""Hosts and the run spread over them lie in `tests/chaos`, whose program needs them too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "chaos"))
