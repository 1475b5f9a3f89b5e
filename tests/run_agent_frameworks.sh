#!/usr/bin/env bash
# Runs the tests of the agent `program` with agents in frameworks that others wrote:
#     bash tests/run_agent_frameworks.sh [pytest arguments; default: all of tests/agent_frameworks]
#
# The frameworks get an environment of their own, made once for their requirements file, in
# ${XDG_CACHE_HOME:-~/.cache}/agentrl.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh dev

requirements=tests/agent_frameworks/requirements.txt
cache="${XDG_CACHE_HOME:-$HOME/.cache}/agentrl"
env="$cache/agent-frameworks-$(sha256sum "$requirements" | cut -c1-16)"

mkdir -p "$cache"
# One set-up at a time; the lock goes with the process that holds it.
exec {lock}>"$cache/agent-frameworks.lock"
flock "$lock"
if [ ! -f "$env/complete" ]; then
    echo "run_agent_frameworks: installing the frameworks into $env (once; some minutes)" >&2
    python -m venv --clear "$env"
    "$env/bin/python" -m pip install --disable-pip-version-check --quiet -r "$requirements"
    touch "$env/complete"
fi
exec {lock}>&-

export FRAMEWORKS_PYTHON="$env/bin/python"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ "$#" -eq 0 ]; then set -- tests/agent_frameworks; fi
exec python -m pytest --quiet --durations=5 --durations-min=5 "$@"
