#!/usr/bin/env bash
# Starts one role of a run on this node:  start.sh serve|sample|train [flags]
#
# The systemd units and the Slurm script in this folder call it. Environment variables:
#
# RUN             name of the run
# PRESET          grpo (default) or minirl
# DB_URL          MongoDB of the run (deploy/mongo/administer.py add-run prints it)
# MODEL           model folder, under one path on all nodes
# FLAGS           flags of the run for its samplers and trainer, separated by spaces
# SERVE_FLAGS     flags of `agentrl serve`, which does not get FLAGS: --fp32_head belongs in both
# MCP_URL, TRAIN_FILE, INFERENCE_URLS, NUM_MACHINES, ... as in docs/guides/deployment.md
#
# INFERENCE_API_KEY  key of the run's inference services: the same for all roles
#
# serve only: SERVICE_PORT (default 30000, further services count on from it), NODE_ADDRESS (name or
# address under which other nodes reach this one; default its host name). On GPUs the engine is
# SGLang, from .venv-sglang unless SGLANG_COMMAND is set, and all GPUs serve: as many services as
# fit them, unless --services or --inf_tp_size say otherwise. [flags] are those of `agentrl serve`,
# else of the run.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
role="${1:-}"
case "$role" in
    serve | sample | train) shift ;;
    *)
        echo "usage: start.sh serve|sample|train [flags]" >&2
        exit 2
        ;;
esac
: "${RUN:?the name of the run}"
: "${DB_URL:?the MongoDB of the run}"
: "${MODEL:?the model folder}"
[ "$role" != serve ] || : "${INFERENCE_API_KEY:?the key that clients of the service must show}"
read -ra flags <<<"${FLAGS:-}"
read -ra serve_flags <<<"${SERVE_FLAGS:-}"
key=()
[ -z "${INFERENCE_API_KEY:-}" ] || key=(--inference_api_key_env INFERENCE_API_KEY)
cd "$root"
# shellcheck source=../../scripts/setup.sh
source scripts/setup.sh run

launch=(agentrl launch "${PRESET:-grpo}" "$RUN" "${key[@]}" "${flags[@]}" "$@")
case "$role" in
    serve)
        port="${SERVICE_PORT:-30000}"
        address="${NODE_ADDRESS:-$(hostname -f)}"
        if [ -z "${SGLANG_COMMAND:-}" ] && compgen -G "/dev/nvidia[0-9]*" >/dev/null; then
            source scripts/setup.sh sglang
        fi
        exec agentrl serve --services auto --model "$MODEL" --run_name "$RUN" "${key[@]}" \
            --host 0.0.0.0 --port "$port" --public_url "http://$address:$port" \
            "${serve_flags[@]}" "$@"
        ;;
    sample) SAMPLERS_ONLY=1 exec "${launch[@]}" ;;
    train) NUM_SAMPLERS=0 NUM_SERVICES=0 exec "${launch[@]}" ;;
esac
