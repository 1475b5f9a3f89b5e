#!/usr/bin/env bash
# Makes the key and the certificates of the replica set:  make_secrets.sh FOLDER ADDRESS...
#
#     FOLDER/keyfile           the members' shared key
#     FOLDER/ca.pem            certificate of a new authority, which clients need too
#     FOLDER/ca.key            key of the authority, which must not be on the nodes
#     FOLDER/ADDRESS/node.pem  certificate and key of the member at that name or IP address
#
# On the node ADDRESS, MONGO_SECRETS must be a folder with keyfile, ca.pem and that node's node.pem.
# Existing files in FOLDER are kept, so call it again to add a member. To use an authority of your
# organisation, put its ca.pem and the certificates that it signed into MONGO_SECRETS instead.
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: make_secrets.sh FOLDER ADDRESS..." >&2
    exit 2
fi
folder="$1"
shift
days=3650
umask 077
mkdir -p "$folder"
cd "$folder"

[ -e keyfile ] || openssl rand -base64 756 >keyfile
if [ ! -e ca.key ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days "$days" \
        -keyout ca.key -out ca.pem -subj "/O=AgentRL/CN=run database authority" 2>/dev/null
fi
for address in "$@"; do
    [ -e "$address/node.pem" ] && continue
    case "$address" in
        *[!0-9.]*) kind=DNS ;;
        *) kind=IP ;;
    esac
    mkdir -p "$address"
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "$address/key" \
        -out "$address/request" -subj "/O=AgentRL/CN=$address" 2>/dev/null
    printf 'subjectAltName=%s:%s,DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=%s\n' \
        "$kind" "$address" serverAuth,clientAuth >"$address/extensions"
    openssl x509 -req -in "$address/request" -CA ca.pem -CAkey ca.key -CAcreateserial \
        -days "$days" -extfile "$address/extensions" -out "$address/certificate" 2>/dev/null
    cat "$address/certificate" "$address/key" >"$address/node.pem"
    rm "$address/certificate" "$address/key" "$address/request" "$address/extensions"
done
