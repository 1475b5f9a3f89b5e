"""`agentrl sample`: one sampler process, from flags to exit."""

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING

from agentrl.configs import Config, check_traces
from agentrl.databases.connection import connect
from agentrl.databases.owners import process_name
from agentrl.databases.records import RecordLedger
from agentrl.databases.services import register_urls
from agentrl.inference.pool import ServicePool
from agentrl.rollout.agents import find_agent, load_agents
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.agents.endpoint import EndpointSampler, NoServices
from agentrl.rollout.agents.limits import check_model_context
from agentrl.rollout.agents.process import Agents, OneAgent
from agentrl.rollout.groups.advantages import find_estimator
from agentrl.rollout.llm.models import AgentModel
from agentrl.rollout.scheduling.attempt import LET_GO_S
from agentrl.rollout.scheduling.demand import Demand
from agentrl.rollout.scheduling.joining import join
from agentrl.rollout.scheduling.process_end import END_S, ProcessEnd, run_to_its_end
from agentrl.rollout.scheduling.process_share import ProcessShare
from agentrl.rollout.scheduling.scheduler import SamplingScheduler
from agentrl.rollout.traces.tracing import open_tracing
from agentrl.stop_signals import StopRequest, stop_signals
from agentrl.tracebacks import log_to_stderr

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

# Garbage is looked for among the newest objects after 2,000 of them, among those that survived one
# look after 20,000, and among all after 2,000,000. At 256 long records the first two hold up the
# event loop for up to 30 ms, and the last for 0.13 s. Our own Records need none of them when they
# end. Python's 700 finds turns in progress mostly, which takes 5 % of a sampler's CPU.
_GC_THRESHOLD = (2_000, 10, 100)


def main(argv: Sequence[str], share: ProcessShare | None = None) -> int:
    """Sample for a run until it is finished or a signal stops it. Returns the exit code."""
    set_up_log()
    run_to_its_end(_join_and_sample(argv, share or ProcessShare()))
    return 0


def set_up_log() -> None:
    """Log to standard error."""
    log_to_stderr("%(asctime)s %(levelname)s %(message)s")
    for chatty in ("httpx2", "mcp"):  # they log every tool call or session
        logging.getLogger(chatty).setLevel(logging.WARNING)


async def _join_and_sample(argv: Sequence[str], share: ProcessShare) -> None:
    config = share.config(await join(argv))
    end = ProcessEnd(asyncio.get_running_loop())
    await sample(config, end=end, process=f"sampler-{share.number}")


async def sample(
    config: Config,
    evaluation: int | None = None,
    end: ProcessEnd | None = None,
    endpoint: AgentModel | None = None,
    demand: Demand | None = None,
    process: str = "sampler",
    figures: "Callable[[], Collector] | None" = None,
) -> None:
    """Sample for the run of `config`, or only for the evaluation at step `evaluation`.

    `end`: of this process, if it does nothing else. `endpoint`: a model behind an API, which is
    asked instead of the run's services. `demand`: who asks for attempts, if they are begun for
    somebody. `process`: its name among those that serve metrics. `figures`: makes further ones.
    """
    check_traces(config.run)
    load_agents(config)
    find_estimator(config.reward.estimator)
    model = config.model.model_name_or_path
    if model is not None and (doubt := check_model_context(config.sampling, model)):
        log.warning("%s", doubt)
    url = config.run.db_connection_string
    assert url is not None, "checked before"
    database = await connect(url, config.run.run_name, config.sampling.startup_timeout)
    try:
        await register_urls(database, config.inference_urls)
        kind = find_agent(config.agent.agent_name) if demand is None else demand.kind
        opened, pool_of = AsyncSampler.open_resources, ServicePool
        agents_of: type[Agents] = Agents if demand is None else OneAgent
        if endpoint is not None:
            kind = EndpointSampler.of(endpoint)
            opened, agents_of, pool_of = kind.open_resources, OneAgent, NoServices
        pool = pool_of(
            api_key=config.sampling.inference_api_key,
            request_timeout_s=config.sampling.request_timeout,
            patience_s=config.sampling.startup_timeout,
        )
        records = RecordLedger(database, config.sampling.lease_seconds)
        async with (
            pool,
            opened(config, pool, records) as shared,
            agents_of(shared, kind) as agents,
            open_tracing(config, database.name, endpoint) as tracing,
        ):
            # Exclude what was loaded so far from garbage collection: each pass over it would block
            # the event loop for 0.1 s and more.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_GC_THRESHOLD)
            url = None if endpoint is None else endpoint.base_url
            name = process_name(None if demand is None else demand.place)
            scheduler = SamplingScheduler(
                database, config, agents, name, evaluation, url, demand, tracing
            )
            loop, asked = asyncio.get_running_loop(), StopRequest()

            def stop(number: int) -> None:
                if asked.take(number) or not scheduler.stopping:
                    scheduler.stop()  # a second call stops at once

            for number in stop_signals():
                if end is None:
                    loop.add_signal_handler(number, stop, number)
                else:
                    end.on_signal(number, stop, config.sampling.drain_seconds + LET_GO_S + END_S)
            log.info("sampler %s of run %s", scheduler.owner, database.name)
            async with _exposed(scheduler, process, figures):
                await _run(scheduler, end)
    finally:
        await database.close()


async def _run(scheduler: SamplingScheduler, end: ProcessEnd | None) -> None:
    """Sample. When that is over, closing what was opened must not take for ever."""
    try:
        await scheduler.run()
    except BaseException as error:
        if end is not None:
            end.failure = error
        raise
    finally:
        if end is not None:
            end.within(END_S)


def _exposed(
    scheduler: SamplingScheduler, process: str, figures: "Callable[[], Collector] | None"
) -> AbstractAsyncContextManager[object]:
    """Serve the figures of this process, if `--metrics_port` asks for it."""
    config, shared = scheduler.config, scheduler.agents.shared
    if config.run.metrics_port is None:
        return nullcontext()
    # Here: without the flag nothing of it is loaded.
    from agentrl.metrics.exposure import exposed
    from agentrl.rollout.scheduling.sampler_figures import SamplerFigures

    ours = SamplerFigures(scheduler, shared.pool, shared.records)
    return exposed(config, process, [ours, *([] if figures is None else [figures()])])
