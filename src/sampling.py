"""Samples and scores tasks with a model as it is: no trainer, fixed weights, until all are done.

    accelerate launch ... src/sampling.py --model_name_or_path MODEL --train_file TASKS --flag value

Scripts of the original AgentRL evaluate so (docs/from-agentrl.md). Without Accelerate, call it by
`python`. `agentrl sample --model MODEL --tasks TASKS` is the same with the defaults of this
trainer.
"""

import sys

from agentrl.launcher.accelerated import sample
from agentrl.user_errors import status_of

if __name__ == "__main__":
    sys.exit(status_of("src/sampling.py", sample, sys.argv[1:]))
