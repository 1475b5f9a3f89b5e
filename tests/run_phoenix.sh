#!/usr/bin/env bash
# Runs the demo with traces to a real Phoenix server, and reads them back with Phoenix's own client:
#     bash tests/run_phoenix.sh [pytest arguments; default: all of tests/phoenix_server]
#
# Phoenix gets an environment of its own (850 MB), made once for its requirements file, in
# ${XDG_CACHE_HOME:-~/.cache}/agentrl. .ci/run does not call this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh dev

source tests/cached.sh
source tests/targets.sh

requirements=tests/phoenix_server/requirements.txt
install() {
    python -m venv "$1"
    "$1/bin/python" -m pip install --disable-pip-version-check --quiet -r "$requirements"
}
cached phoenix "$(hash_of <"$requirements")" install

export PHOENIX_PYTHON="$folder/bin/python"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
with_target tests/phoenix_server "$@"
exec python -m pytest --quiet --timeout=500 --durations=5 --durations-min=5 "${arguments[@]}"
