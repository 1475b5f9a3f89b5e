"""Not collected without Prometheus: `tests/run_prometheus.sh` brings it."""

import os

collect_ignore = [] if "GRAFANA_TYPES" in os.environ else ["test_prometheus.py"]
