"""What these tests share with those of the gateway. Without `FRAMEWORKS_PYTHON`, which
run_agent_frameworks.sh sets, nothing here is collected."""

import os
import sys
from pathlib import Path

for _folder in (Path(__file__).parents[1] / "gateway", Path(__file__).parent):
    sys.path.insert(0, str(_folder))  # `gateway_stage`, `example_run`

from gateway_stage import demo_renderer, stage  # noqa: E402, F401

collect_ignore_glob = [] if "FRAMEWORKS_PYTHON" in os.environ else ["test_*.py"]
