"""What these tests are made of lies beside them, and is used by the chaos program too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
