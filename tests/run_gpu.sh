#!/usr/bin/env bash
# The first hour on a GPU, in one command: everything that only a GPU can show, by name.
#     bash tests/run_gpu.sh [--list] [--only NAME] [--out FILE]
#
# It sets up what is missing, SGLang too (some minutes, once), and then takes at most 15 minutes:
# what is left then is not run, and named. Without a GPU the same checks run on the CPU with small
# models; with the real SGLang by
#     bash tests/run_sglang.sh tests/gpu/test_check_runner.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh dev
if [ -z "${SGLANG_COMMAND:-}" ] && compgen -G "/dev/nvidia[0-9]*" >/dev/null; then
    # Without it the checks that need it are skipped by name, and the others run.
    source scripts/setup.sh sglang || echo "run_gpu: SGLang is not installed" >&2
fi
exec python tests/gpu/check_runner.py "$@"
