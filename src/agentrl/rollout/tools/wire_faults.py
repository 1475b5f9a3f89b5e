"""JSON-RPC errors of our own: what a wire answers in place of a server that gave no answer."""

WIRE_FAULT = -32050  # no answer came, and the server may have had the request
NOT_REACHED = -32054  # it has not had it
REFUSED = -32051
SESSION_GONE = -32052
OVERSIZE = -32053
