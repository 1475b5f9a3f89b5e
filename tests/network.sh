#!/usr/bin/env bash
# What the tests on hosts of their own and those of the sandbox need of this machine (tests/deployment,
# tests/chaos): iproute2, and the right to make namespaces. Installs the first where it can, and says what is missing.
set -euo pipefail

if ! command -v ip >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing iproute2 (once)" >&2
        apt-get install --yes --quiet iproute2 >&2 || {
            apt-get update --quiet >&2 && apt-get install --yes --quiet iproute2 >&2
        }
    else
        echo "tests/network.sh: no \`ip\` on PATH: install iproute2 (as root, on Debian and Ubuntu:" \
            "apt install iproute2)" >&2
        exit 1
    fi
fi
user=()
[ "$(id -u)" = 0 ] || user=(--map-root-user)
if ! unshare "${user[@]}" --net true || ! unshare --map-root-user --mount --pid --fork true; then
    echo "tests/network.sh: no network or user namespaces can be made: run this as root, or allow user" \
        "namespaces (as root: sysctl -w kernel.unprivileged_userns_clone=1, or on Ubuntu 24.04" \
        "kernel.apparmor_restrict_unprivileged_userns=0). In a container, start it with" \
        "--cap-add=SYS_ADMIN --cap-add=NET_ADMIN" >&2
    exit 1
fi
