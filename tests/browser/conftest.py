"""Not collected without a browser: `tests/run_browser.sh` brings one."""

import os

collect_ignore = [] if "BROWSER_PYTHON" in os.environ else ["test_in_browser.py"]
