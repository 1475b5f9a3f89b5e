"""A launched process that saves checkpoints; the second of them dies while it writes its part.

accelerate launch --config_file assets/fsdp2_cpu.yml --num_processes 2 dying_rank.py OUT
"""

import os
import sys
from pathlib import Path

from checkpointing import die_saving

if __name__ == "__main__":
    die_saving(Path(sys.argv[1]), change=3 if os.environ["RANK"] == "1" else 0)
