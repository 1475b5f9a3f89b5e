"""One optimizer step: rows of one rank -> micro-batches -> gradients -> update and statistics.

learner.py      what learns: the policy with its optimizer and schedule, the critic
probe.py        in which form of micro-batches a model is trained right, found at the start
partial_gradients.py    gradients that a plan of tensor parallelism forgets to sum
train_step.py   the step, top to bottom
schedule.py     which forward and backward passes it takes, in which order
passes.py       from the schedule to gradients
objective.py    the loss with its weights, masks and penalties, as one share of a batch
statistics.py   what is counted on the way, over all ranks
optimizer.py    optimizer and learning-rate schedule
state_offload.py    what the device holds between steps, on the host
auxiliary.py    the models beside the policy: reference.py, critic.py (gae.py, critic_loss.py)
"""
