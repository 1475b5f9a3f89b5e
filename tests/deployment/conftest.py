"""Hosts and the run spread over them are made by what lies in `tests/chaos`, which needs them too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "chaos"))
