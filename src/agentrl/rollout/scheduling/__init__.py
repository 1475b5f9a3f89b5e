"""Which rollouts a sampler works on, and when.

worker.py        the sampler's process
scheduler.py     claims rollouts, runs attempts, keeps their leases
attempt.py       one attempt, from its claim to its end in the ledger
claim_state.py   what a sampler knows of the work that there is to claim
work_view.py     what of the run a sampler has to know: tasks, services, its end
admission.py     how far samplers may run ahead of the trainer
concurrency.py   how many rollouts at once
load_report.py   what it sees of its services' load and of its own, stored for people
demand.py        attempts that are begun only where somebody asks for them
process_share.py which part of a machine's rollouts is a process's
joining.py       a sampler that is started by hand beside a run
process_end.py   a sampler's process ends when it is to, whatever code of users does in it
"""
