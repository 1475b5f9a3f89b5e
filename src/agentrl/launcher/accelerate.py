"""`accelerate launch` for the launcher's trainer: as it is, but that a stop in order ends in order.

    python -m agentrl.launcher.accelerate FLAGS -m MODULE ...

torch's agent answers a signal by ending its workers, waits for them, and then raises
`SignalException`, which nobody catches: the log of every stop ended in its traceback.
"""

import sys

from accelerate.commands.launch import main
from torch.distributed.elastic.multiprocessing.api import SignalException

if __name__ == "__main__":
    try:
        main()
    except SignalException as stop:
        sys.exit(128 + stop.sigval)
