"""The chaos program's parts, as the program itself finds them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
