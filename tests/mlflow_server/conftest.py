"""Not collected without MLflow: `tests/run_mlflow.sh` brings it."""

import os

collect_ignore = [] if "MLFLOW_PYTHON" in os.environ else ["test_mlflow.py"]
