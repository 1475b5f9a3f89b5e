#!/usr/bin/env bash
# Opens the pages of `agentrl view` in a real Chromium:
#     bash tests/run_browser.sh [pytest arguments; default: all of tests/browser]
#
# Chromium is Debian's, installed where that is possible. What drives it gets an environment of its
# own, made once for its requirements file, in ${XDG_CACHE_HOME:-~/.cache}/agentrl.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh dev

if ! command -v chromium >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing chromium (once)" >&2
        apt-get update --quiet >&2
        apt-get install --yes --quiet --no-install-recommends chromium fonts-dejavu-core >&2
    else
        echo "run_browser: no \`chromium\` on PATH: install it (as root, on Debian: apt install" \
            "chromium)" >&2
        exit 2
    fi
fi

source tests/cached.sh
source tests/targets.sh

requirements=tests/browser/requirements.txt
install() {
    python -m venv "$1"
    "$1/bin/python" -m pip install --disable-pip-version-check --quiet -r "$requirements"
}
cached browser "$(hash_of <"$requirements")" install

export BROWSER_PYTHON="$folder/bin/python"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
with_target tests/browser "$@"
exec python -m pytest --quiet -m "slow or not slow" --durations=5 --durations-min=5 "${arguments[@]}"
