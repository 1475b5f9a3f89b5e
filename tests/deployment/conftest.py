"""Hosts and the run spread over them lie in `tests/chaos`, whose program needs them too.

The sandbox server as a process lies beside this file.
"""

import sys
from pathlib import Path

for tests in ("rollout", "chaos"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / tests))
sys.path.insert(0, str(Path(__file__).parent))
