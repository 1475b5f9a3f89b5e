#!/usr/bin/env bash
# Runs the tests of the tools against MCP servers that others wrote, the protocol's reference servers:
#     bash tests/run_reference_servers.sh [pytest arguments; default: all of tests/reference_servers]
#
# Needs node 20 or newer and npm. The servers are installed once for their lock file, in
# ${XDG_CACHE_HOME:-~/.cache}/agentrl.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh dev
for program in node npm; do
    if ! command -v "$program" >/dev/null; then
        echo "run_reference_servers: needs $program, of Node.js 20 or newer" >&2
        exit 2
    fi
done

source tests/cached.sh
source tests/targets.sh

lock_file=tests/reference_servers/package-lock.json
install() {
    cp tests/reference_servers/package.json "$lock_file" "$1"
    npm ci --prefix "$1" --ignore-scripts --no-audit --no-fund --loglevel error >&2
}
cached reference-servers "$(hash_of <"$lock_file")" install

export REFERENCE_SERVERS="$folder/node_modules/@modelcontextprotocol"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
with_target tests/reference_servers "$@"
exec python -m pytest --quiet --durations=5 --durations-min=2 "${arguments[@]}"
