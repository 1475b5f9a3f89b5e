#!/usr/bin/env bash
# Trains with GRPO:  ./grpo_example.sh RUN [--flag value ...]
# Unedited it runs the demo on one machine. The environment variables that place it elsewhere, and
# all flags: ./grpo_example.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh" run
AGENTRL_COMMAND=$0 exec agentrl launch grpo "$@"
