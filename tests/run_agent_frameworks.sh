#!/usr/bin/env bash
# Runs the tests of the agent `program` with agents in frameworks that others wrote, and those of
# examples/:
#     bash tests/run_agent_frameworks.sh [pytest arguments; default: all of tests/agent_frameworks]
#
# The frameworks get an environment of their own, made once for their requirements, in
# ${XDG_CACHE_HOME:-~/.cache}/agentrl.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh dev

source tests/cached.sh
source tests/targets.sh

requirements=(examples/requirements.txt tests/agent_frameworks/requirements.txt requirements.txt)
install() {
    python -m venv "$1"
    # Examples run beside AgentRL in one process, so what both need has AgentRL's version. Extras
    # have no place in a constraint.
    sed 's/\[.*\]//' requirements.txt >"$1/constraints.txt"
    "$1/bin/python" -m pip install --disable-pip-version-check --quiet \
        -r "${requirements[0]}" -r "${requirements[1]}" -c "$1/constraints.txt"
}
cached agent-frameworks "$(cat "${requirements[@]}" | hash_of)" install

export FRAMEWORKS_PYTHON="$folder/bin/python"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
with_target tests/agent_frameworks "$@"
exec python -m pytest --quiet --durations=5 --durations-min=5 "${arguments[@]}"
