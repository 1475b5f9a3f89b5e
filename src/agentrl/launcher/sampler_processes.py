"""`agentrl sample`: several sampler processes, one event loop each, and who watches over them.

With `--model` and `--tasks` there is a run to begin first (`sampling_run.py`). Else it joins one.

With `--sampler_processes 1` there is one process, which is this one (`scheduling/worker.py`). Else
this process samples nothing itself: it starts the others, starts again what dies, hands signals on,
and ends when they have, with a status that says what became of them. A launch starts its samplers
with the same parts, beside its trainer and its services.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.configs.parsing import given_values, handed_on
from agentrl.configs.verbs import sample_parser
from agentrl.importing import importing
from agentrl.launcher.deployment import default_sampler_processes, usable_cores
from agentrl.launcher.processes import RESTARTS, Kind, Part
from agentrl.launcher.supervision import supervise
from agentrl.rollout.scheduling.process_share import ProcessShare

log = logging.getLogger(__name__)

_HAND_BACK_S = 20.0  # beside --drain_seconds: a sampler ends by itself before (`process_end.py`)


def sampler_part(
    share: ProcessShare, flags: Sequence[str], drain_s: float, log_file: Path | None = None
) -> Part:
    """A sampler process as it is started. `drain_s`: its `--drain_seconds`. `log_file`: where its
    output goes, if not to that of this process."""
    words, secrets = handed_on(flags, os.environ)
    return Part(
        name=f"sampler-{share.number}",
        kind=Kind.SAMPLER,
        command=(sys.executable, "-m", "agentrl.cli", "sample", *words),
        log=log_file,
        # A sampler waits for answers and parses them. It has no tensors to compute with threads.
        environment={**secrets, "OMP_NUM_THREADS": "1", **share.environment},
        restarts=RESTARTS,
        may_end=True,
        grace_s=drain_s + _HAND_BACK_S,
    )


def gateway_part(flags: Sequence[str], log_file: Path) -> Part:
    """A gateway in the place of samplers, as it is started."""
    words, secrets = handed_on(flags, os.environ)
    return Part(
        name="gateway",
        kind=Kind.SAMPLER,
        command=(sys.executable, "-m", "agentrl.cli", "gateway", *words),
        log=log_file,
        environment={**secrets, "OMP_NUM_THREADS": "1"},
        restarts=RESTARTS,
        may_end=True,
        grace_s=_HAND_BACK_S,
    )


def main(argv: Sequence[str]) -> int:
    """Sample for a run until it is finished. A signal stops it in order, the same again at once."""
    # Here: a launch, which starts its samplers by `sampler_part`, need not load what they do.
    with importing():
        from agentrl.rollout.scheduling import worker

    share = ProcessShare.read(os.environ)
    if share is not None:
        return worker.main(argv, share)
    parsed = sample_parser().parse(argv)
    if parsed.own.model is not None or parsed.own.tasks is not None:
        from agentrl.launcher import sampling_run

        return sampling_run.main(parsed)
    given = given_values(argv, "agentrl sample")
    count = ProcessShare.processes(
        given.get("sampler_processes") or default_sampler_processes(usable_cores()),
        given.get("target_concurrency") or 0,
    )
    return worker.main(argv) if count == 1 else asyncio.run(_supervise(argv, count))


async def _supervise(argv: Sequence[str], count: int) -> int:
    from agentrl.rollout.scheduling.joining import join
    from agentrl.rollout.scheduling.worker import set_up_log

    set_up_log()
    # Here once: what is wrong with the flags is not said by each process.
    config = await join(argv)
    log.info(
        "%d sampler processes, each with up to %d trajectories at once",
        count,
        config.sampling.max_concurrent_samples_per_process,
    )
    drain_s = config.sampling.drain_seconds
    parts = [sampler_part(ProcessShare(number, count), argv, drain_s) for number in range(count)]
    return await supervise(parts, Kind.SAMPLER)
