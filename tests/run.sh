#!/usr/bin/env bash
# Runs the tests:  bash tests/run.sh [pytest arguments; default: all of tests/]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh" dev
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# More workers than cores, because tests wait for processes that start and leases that end.
cores=$(env -u OMP_NUM_THREADS nproc)
workers=$((cores < 3 ? cores + 2 : 4))
# One thread a process: tests start several, and thread pools on few cores only get in their way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Compiled modules are kept, also where the environment says otherwise: each worker would rewrite the
# tests' assertions anew, and each process compile AgentRL.
unset PYTHONDONTWRITEBYTECODE
# A file's tests stay together, because they share servers. Files are begun in the order of
# tests/conftest.py, the longest first, and not by how many tests they hold.
exec python -m pytest --quiet --numprocesses="$workers" \
    --dist=loadfile --no-loadscope-reorder --durations=10 --durations-min=2 "$@"
