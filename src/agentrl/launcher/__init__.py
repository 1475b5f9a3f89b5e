"""Starts the processes of a run on one machine, watches them, and reports.

The launcher holds nothing of the pipeline. Its processes have command lines, and it reads their
progress from the run's database and its metrics file.

A launch
    run.py, launch.py, launch_help.py   `agentrl launch`, from the flags to the report
    preflight.py, probes.py, service_checks.py, receiver_checks.py,
    tracker_keys.py           what is checked and tried before
    inventory.py, model_sizes.py, placement.py, gpu_plan.py,
    service_plan.py           which GPUs train and which serve
    presets.py, deployment.py, stack.py, service_part.py   which processes there are, with which
                              command lines
    sglang_setup.py           SGLang's environment
    processes.py, accelerate.py, sampler_processes.py   child processes
    run_folder.py, run_parts.py   what a run writes in its folder
What is seen
    progress.py, view.py, terminal.py, other_samplers.py   while the run lasts
    report.py, curve.py, training_curves.py   at its end
The other verbs
    serve.py, evaluate.py, evaluation.py, statistics.py, rescore.py, doctor.py, config.py, plan.py
    show.py, show_record.py, show_list.py, show_tokens.py, show_diff.py, show_failed.py,
    record_filter.py, trajectory.py, trajectory_tokens.py   trajectories
    runs.py, run_state.py, delete.py, db.py, database.py   runs and their databases
"""
