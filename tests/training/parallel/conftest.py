"""Makes the folder's modules importable for tests, as they are for the processes they launch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
