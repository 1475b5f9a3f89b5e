#!/usr/bin/env bash
# Runs the tests of the agent `program` with agents in frameworks that others wrote:
#     bash tests/run_agent_frameworks.sh [pytest arguments; default: all of tests/agent_frameworks]
#
# The frameworks get an environment of their own, made once for their requirements file, in
# ${XDG_CACHE_HOME:-~/.cache}/agentrl.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh dev

source tests/cached.sh

requirements=tests/agent_frameworks/requirements.txt
install() {
    python -m venv "$1"
    "$1/bin/python" -m pip install --disable-pip-version-check --quiet -r "$requirements"
}
cached agent-frameworks "$(hash_of <"$requirements")" install

export FRAMEWORKS_PYTHON="$folder/bin/python"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ "$#" -eq 0 ]; then set -- tests/agent_frameworks; fi
exec python -m pytest --quiet --durations=5 --durations-min=5 "$@"
