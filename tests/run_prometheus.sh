#!/usr/bin/env bash
# Shows a live run to the real Prometheus, and checks rules and dashboard:
#     bash tests/run_prometheus.sh [pytest arguments; default: all of tests/prometheus]
#
# Prometheus and promtool are those on PATH, or Debian's, unpacked and not installed: a daemon would
# begin. They and Grafana's own types of a dashboard are fetched once, into
# ${XDG_CACHE_HOME:-~/.cache}/agentrl.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh dev
source tests/cached.sh
source tests/targets.sh

requirements=tests/prometheus/requirements.txt
install() {
    python -m venv "$1/types"
    "$1/types/bin/python" -m pip install --disable-pip-version-check --quiet -r "$requirements"
    if command -v prometheus >/dev/null && command -v promtool >/dev/null; then return; fi
    if ! command -v apt-get >/dev/null; then
        echo "run_prometheus: no \`prometheus\` on PATH: install it (on Debian: apt install" \
            "prometheus)" >&2
        return 2
    fi
    (
        cd "$1"
        apt-get download --quiet prometheus >&2 || {
            apt-get update --quiet >&2
            apt-get download --quiet prometheus >&2
        }
        dpkg-deb --extract prometheus_*.deb .
        rm prometheus_*.deb
    )
}
cached prometheus "$(hash_of <"$requirements")" install

export PATH="$PATH:$folder/usr/bin" GRAFANA_TYPES="$folder/types/bin/python"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
with_target tests/prometheus "$@"
exec python -m pytest --quiet -m "slow or not slow" --durations=5 --durations-min=5 "${arguments[@]}"
