"""JSON-RPC errors of our own: what a wire answers in place of a server that gave no answer."""

WIRE_FAULT = -32050  # the server's answer did not come, and it may have had the request
REFUSED = -32051
SESSION_GONE = -32052
OVERSIZE = -32053
