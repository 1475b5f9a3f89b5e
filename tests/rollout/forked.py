"""Python programs in processes of their own that are forked from one with MCP's libraries loaded.

Importing those takes 1.7 s of CPU time, and tests of tools start some twenty servers.
"""

import runpy
import sys
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

_context = get_context("forkserver")
_context.set_forkserver_preload(["mcp.server.mcpserver", "uvicorn"])


def start_program(path: str, *arguments: str) -> BaseProcess:
    """Run the program with these arguments, as `python PATH ARGUMENTS`; it ends with the tests."""
    process = _context.Process(target=_run, args=(path, arguments), daemon=True)
    process.start()
    return process


def _run(path: str, arguments: tuple[str, ...]) -> None:
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
