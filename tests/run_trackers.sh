#!/usr/bin/env bash
# Runs the tests of --report_to with the packages of requirements-trackers.txt, offline:
#     bash tests/run_trackers.sh [pytest arguments; default: all of tests/trackers]
#
# The packages are installed once for these requirements, in ${XDG_CACHE_HOME:-~/.cache}/agentrl.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh dev

source tests/cached.sh
source tests/targets.sh

requirements=(requirements-trackers.txt requirements.txt)
install() {
    # They run in the trainer, so what both need has AgentRL's version. Extras have no place in a
    # constraint.
    python -m pip install --disable-pip-version-check --quiet --target "$1/packages" \
        -r "${requirements[0]}" -c <(sed 's/\[.*\]//' "${requirements[1]}")
}
cached trackers "$(cat "${requirements[@]}" | hash_of)" install

export TRACKERS_FOLDER="$folder/packages"
export PYTHONPATH="$TRACKERS_FOLDER${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
with_target tests/trackers "$@"
exec python -m pytest --quiet --durations=5 --durations-min=5 "${arguments[@]}"
