"""Makes `writers`, which the fuzz program imports too, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
