"""Trains, in processes that Accelerate starts; on each machine:

    accelerate launch --config_file assets/fsdp2_dst.yml --num_processes N --num_machines M \\
        --machine_rank R --main_process_ip HOST --main_process_port PORT src/main.py --flag value

Scripts of the original AgentRL call it so (docs/from-agentrl.md). See `launcher/accelerated.py`.
"""

import sys

from agentrl.launcher.accelerated import train
from agentrl.user_errors import status_of

if __name__ == "__main__":
    sys.exit(status_of("src/main.py", train, sys.argv[1:]))
