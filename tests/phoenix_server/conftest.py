"""Not collected without Phoenix: `tests/run_phoenix.sh` brings it."""

import os

collect_ignore = [] if "PHOENIX_PYTHON" in os.environ else ["test_phoenix.py"]
