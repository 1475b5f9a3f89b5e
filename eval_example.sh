#!/usr/bin/env bash
# Evaluates a run's last checkpoint on its held-out tasks:  ./eval_example.sh RUN [--flag value ...]
# or a model as it is, under a new name:  MODEL=DIR EVAL_FILE=JSONL ./eval_example.sh NAME [...]
# or several side by side:  ./eval_example.sh --model DIR --model RUN --tasks JSONL
# All flags: ./eval_example.sh --help
set -euo pipefail
export AGENTRL_CALLER_PATH="$PATH" # what is printed at the end is to be typed there
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh" run
AGENTRL_COMMAND=$0 exec agentrl eval "$@"
