"""The domain and its ledger. It imports nothing else of the package; all of it may be imported.

What is stored
    documents.py, transitions.py   the documents, and which state may follow which
    token_tree.py, growing_tree.py, arrays.py   tokens of a Record
    conversation.py   what was said in a Record, as texts
    notes.py   what people write on a Record
    task_file/, scorer_notation.py   what users write in task files
The ledgers
    tasks.py, slot_ends.py, expressions.py   of sampling: who works on which rollout
    task_choice.py, free_groups.py   which groups a claim may take
    held_leases.py, reaping.py, owners.py   leases: held, taken away, and by whom
    scorings.py   of trajectories that have no score yet
    due.py   a look for what was put off, or left by dead samplers
    retries.py   how often what failed is tried again, and how soon
    records.py, storable.py   what samplers write of their work
    group_commit.py, batches.py   many writes in one command
    finalisations.py, rescoring.py   the end of a group, and scores given anew
    quarantine.py   what waits for a person, and its release
    row_ledger.py   of training: which rows a step trains
    feeder.py   from task files to the ledger
The run
    runs.py, run_list.py   who trains it, how far it is; all runs of a MongoDB
    policies.py, services.py   publications of weights; the services that serve them
    loads.py, device_use.py   what services and samplers do now; devices and hours so far
    success.py   what counts as right, and the success of the run's policies
    outcomes.py, diagnosis.py, hopeless.py, failed_tasks.py   what fails, and when a run is given up
The server
    connection.py, changes.py, mongod.py   the connection, waiting for changes, an own mongod
"""
