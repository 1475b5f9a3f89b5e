"""The chaos program's parts, as the program itself finds them, and parts of other tests."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE.parent / "rollout", HERE.parent / "databases", HERE):
    sys.path.insert(0, str(folder))
