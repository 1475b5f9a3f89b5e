#!/usr/bin/env bash
# Runs the contract tests against the real SGLang server, on the CPU:
#     bash tests/run_sglang.sh [pytest arguments; default: all of tests/contract]
#
# The server gets an environment of its own (3 GB), made once for these requirement files in
# ${XDG_CACHE_HOME:-~/.cache}/agentrl. On a GPU node the same tests run against the SGLang there:
#     SGLANG_COMMAND="/opt/sglang/bin/python -m sglang.launch_server" bash tests/run.sh tests/contract
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root="$PWD"
source scripts/setup.sh dev

source tests/cached.sh
source tests/targets.sh

# Installed without what they require: for the most part kernels for GPUs.
bare=(-r requirements-sglang.txt torchvision==0.29.2)

install() {
    python -m venv "$1"
    local pip=("$1/bin/python" -m pip install --disable-pip-version-check --quiet)
    "${pip[@]}" -r tests/sglang/requirements-cpu.txt
    "${pip[@]}" --no-deps "${bare[@]}"
}
key="$({ cat requirements-sglang.txt tests/sglang/requirements-cpu.txt; echo "${bare[*]}"; } | hash_of)"
cached sglang "$key" install

# Without its kernels, and with a cache that is small but holds more than the context.
export SGLANG_COMMAND="$folder/bin/python $root/tests/sglang/launch_cpu.py --device cpu \
    --attention-backend torch_native --sampling-backend pytorch --grammar-backend xgrammar \
    --constrained-json-disable-any-whitespace --max-total-tokens 16384 --mem-fraction-static 0.3"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
with_target tests/contract "$@"
# The first start of a new environment takes a while.
exec python -m pytest --quiet -m "slow or not slow" --timeout 600 --durations=5 --durations-min=5 "${arguments[@]}"
