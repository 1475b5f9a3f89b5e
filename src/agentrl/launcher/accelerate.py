"""`accelerate launch` for the launcher's trainer: a port that is bound, signals, a quiet end.

    python -m agentrl.launcher.accelerate FLAGS -m MODULE ...

Processes of one machine meet at a port that torch's agent binds itself (`--standalone`), unless
`--main_process_port` names one. Every signal that ends a run in order reaches the processes, and
`TORCH_ELASTIC_SHUTDOWN_TIMEOUT` says how many seconds they then have.

On a signal torch's agent ends its workers, waits for them, and then raises `SignalException`.
Nobody catches that, so without this file the log of every stop would end in a traceback.
"""

import sys

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException

from agentrl.stop_signals import stop_signals


def main() -> None:
    """Launch what the command line says."""
    arguments = launch_command_parser().parse_args()
    if arguments.main_process_port is None:
        # torch's own flags, which Accelerate hands on without having them.
        arguments.standalone = True
        arguments.local_addr = "127.0.0.1"
        arguments.main_process_port = 0  # of no use then; the default is looked at
    arguments.signals_to_handle = ",".join(["SIGQUIT", *(each.name for each in stop_signals())])
    launch_command(arguments)


if __name__ == "__main__":
    try:
        main()
    except SignalException as stop:
        sys.exit(128 + stop.sigval)
