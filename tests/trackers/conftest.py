"""Not collected without the trackers: `tests/run_trackers.sh` brings them."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `tracker_readers`

collect_ignore = [] if "TRACKERS_FOLDER" in os.environ else ["test_trackers.py"]


@pytest.fixture(scope="session", autouse=True)
def _one_folder_of_trackio(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Trackio chooses its folder when it is imported."""
    os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))
