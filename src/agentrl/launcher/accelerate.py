"""`accelerate launch` for the launcher's trainer, with a quiet end when a run is stopped.

    python -m agentrl.launcher.accelerate FLAGS -m MODULE ...

On a signal torch's agent ends its workers, waits for them, and then raises `SignalException`.
Nobody catches that, so without this file the log of every stop would end in a traceback.
"""

import sys

from accelerate.commands.launch import main
from torch.distributed.elastic.multiprocessing.api import SignalException

if __name__ == "__main__":
    try:
        main()
    except SignalException as stop:
        sys.exit(128 + stop.sigval)
