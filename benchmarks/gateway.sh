#!/usr/bin/env bash
# Runs benchmarks/gateway.py beside LiteLLM's proxy, which gets an environment of its own:
#     bash benchmarks/gateway.sh [--quick] [--save]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh dev

source tests/cached.sh

requirements=benchmarks/litellm_requirements.txt
install() {
    python -m venv "$1"
    "$1/bin/python" -m pip install --disable-pip-version-check --quiet -r "$requirements"
}
cached litellm "$(hash_of <"$requirements")" install

LITELLM_PYTHON="$folder/bin/python" exec python benchmarks/gateway.py "$@"
