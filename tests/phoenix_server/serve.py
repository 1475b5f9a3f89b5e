"""Run by Phoenix's Python: its server, by its environment variables, without its receiver of gRPC,
which listens on all addresses."""

import sys
from typing import Any

import phoenix.server.app
from phoenix.server.grpc_server import GrpcServer
from phoenix.server.main import main


def without_grpc(*given: Any, **named: Any) -> GrpcServer:
    return GrpcServer(*given, **{**named, "disabled": True})


phoenix.server.app.GrpcServer = without_grpc
sys.argv[1:] = ["serve"]
main()
