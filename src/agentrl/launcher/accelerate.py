"""`accelerate launch` for the launcher's trainer: a port that is bound, signals, a quiet end.

    python -m agentrl.launcher.accelerate FLAGS -m MODULE ...

Processes of one machine meet at a port that torch's agent binds itself (`--standalone`), unless
`--main_process_port` names one. Every signal that ends a run in order reaches the processes, and
`TORCH_ELASTIC_SHUTDOWN_TIMEOUT` says how many seconds they then have.

On a signal torch's agent ends its workers, waits for them, and then raises `SignalException`.
Nobody catches that, so without this file the log of every stop would end in a traceback.

A single process needs no agent: it calls the module's `run_process(argv)` itself, with the
environment that `accelerate launch` gives a worker. Torch is then loaded once instead of twice.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from copy import copy
from importlib import import_module
from typing import NoReturn

from agentrl.importing import importing
from agentrl.stop_signals import stop_signals

with importing():
    from accelerate.commands.launch import (
        _validate_launch_command,
        launch_command,
        launch_command_parser,
    )
    from accelerate.utils.launch import prepare_multi_gpu_env


def main() -> None:
    """Launch what the command line says."""
    arguments = launch_command_parser().parse_args()
    if arguments.main_process_port is None:
        # torch's own flags, which Accelerate hands on without having them.
        arguments.standalone = True
        arguments.local_addr = "127.0.0.1"
        arguments.main_process_port = 0  # of no use then; the default is looked at
    if arguments.num_processes == 1:
        alone, _, _ = _validate_launch_command(copy(arguments))
        if not (alone.use_deepspeed or alone.use_megatron_lm or alone.tpu):  # launched otherwise
            _become(alone)
    _launch(arguments)


def _launch(arguments: Namespace) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    arguments.signals_to_handle = ",".join(["SIGQUIT", *(each.name for each in stop_signals())])
    try:
        launch_command(arguments)
    except SignalException as stop:
        sys.exit(128 + stop.sigval)


def _become(arguments: Namespace) -> NoReturn:
    """Be the module's process, as the only one of its process group."""
    os.environ.update(
        prepare_multi_gpu_env(arguments),
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",  # the store of the group binds a free one
    )
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a log that is read
    with importing():
        module = import_module(arguments.training_script)
    run_process: Callable[[Sequence[str]], NoReturn] = module.run_process
    run_process(arguments.training_script_args)


if __name__ == "__main__":
    main()
