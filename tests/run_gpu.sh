#!/usr/bin/env bash
# The first hour on a GPU, in one command: everything that only a GPU can show, by name.
#     bash tests/run_gpu.sh [--list] [--only NAME] [--out FILE]
#
# It sets up what is missing (some minutes, once) and then takes at most 15 minutes: what is left
# then is not run, and named. Without a GPU the same checks run on the CPU with small models.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh dev
exec python tests/gpu/check_runner.py "$@"
