#!/usr/bin/env bash
# Starts one member of the run database's replica set, with authentication and optionally TLS.
# compose.yml calls it in the container. Without a container:
#
#     MONGO_ADDRESS=db1.lan MONGO_SECRETS=/etc/agentrl/mongo MONGO_DATA=/data/db bash mongod.sh
#
# MONGO_ADDRESS   the name or address under which other nodes reach this member
# MONGO_SECRETS   folder with `keyfile`, and for TLS `ca.pem` and `node.pem` (make_secrets.sh)
# MONGO_DATA      data folder (default /data/db)
# MONGO_PORT      port (default 27017)
# MONGO_TLS       1: require TLS; 0: no TLS, for a network without other users (default 1)
# MONGO_CACHE_GB  cache of the storage engine (default: mongod's own, half of the memory)
set -euo pipefail
: "${MONGO_ADDRESS:?the address under which other nodes reach this member}"
: "${MONGO_SECRETS:?the folder that make_secrets.sh has filled}"
data="${MONGO_DATA:-/data/db}"

# mongod refuses a key that others can read, and a mounted file has the permissions of the host.
keyfile="$data/keyfile"
install -m 400 "$MONGO_SECRETS/keyfile" "$keyfile"

options=(
    --dbpath "$data" --port "${MONGO_PORT:-27017}" --replSet rs0
    --bind_ip "localhost,$MONGO_ADDRESS" --keyFile "$keyfile"
)
if [ "${MONGO_TLS:-1}" = 1 ]; then
    options+=(
        --tlsMode requireTLS --tlsCAFile "$MONGO_SECRETS/ca.pem"
        --tlsCertificateKeyFile "$MONGO_SECRETS/node.pem"
        # Clients authenticate by password. Only members have certificates.
        --tlsAllowConnectionsWithoutCertificates
    )
fi
if [ -n "${MONGO_CACHE_GB:-}" ]; then
    options+=(--wiredTigerCacheSizeGB "$MONGO_CACHE_GB")
fi
exec mongod "${options[@]}"
