#!/usr/bin/env bash
# Trains with MINIRL:  ./minirl_example.sh RUN [--flag value ...]
# Unedited it runs the demo on one machine. The environment variables that place it elsewhere, and
# all flags: ./minirl_example.sh --help
set -euo pipefail
export AGENTRL_CALLER_PATH="$PATH" # what is printed at the end is to be typed there
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh" run
AGENTRL_COMMAND=$0 exec agentrl launch minirl "$@"
