"""The engine over HTTP: SGLang's routes, and start and stop of the process."""

import asyncio
import dataclasses
import gc
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing, nullcontext, suppress

import orjson
import torch
import uvloop
from aiohttp import ClientConnectionResetError, web

from agentrl.access import admits
from agentrl.inference.engine.config import Announcement, EngineConfig
from agentrl.inference.engine.control import ControlBody, answer, bad_request
from agentrl.inference.engine.engine import LocalEngine
from agentrl.inference.engine.http_api import (
    BodyError,
    PromptRequest,
    RequestError,
    generate_answer,
    parse_generate,
)
from agentrl.inference.engine.sampling import TokenSampling
from agentrl.inference.engine.scheduler import PAUSE_MODES
from agentrl.inference.engine.weight_routes import WeightRoutes
from agentrl.stop_signals import stop_signals

log = logging.getLogger(__name__)

_HEALTH_TIMEOUT_S = 20.0
_LARGEST_BODY = 256 * 2**20
# Path prefixes that need no key, as in SGLang: for probes and Prometheus.
_OPEN_TO_ALL = ("/health", "/ready", "/metrics")


def serve(config: EngineConfig, announcement: Announcement | None = None) -> None:
    """Serve a model until SIGTERM or SIGINT, which aborts running requests; new ones get 503.

    `announcement` is entered with the service's URL while it serves. Raises OSError or ValueError
    if the model cannot be loaded or the port is taken.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    engine = LocalEngine(config)
    # Loaded objects stay alive, so the garbage collector need not visit them during steps.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(engine, config, announcement))


async def _serve(
    engine: LocalEngine, config: EngineConfig, announcement: Announcement | None
) -> None:
    server = _Server(engine)
    # A client that hangs up cancels its handler, and with it its generation.
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.set)
    try:
        await web.TCPSite(runner, config.host, config.port).start()
        url = f"http://{config.host}:{runner.addresses[0][1]}"
        stepping = asyncio.create_task(engine.run())
        stopping = asyncio.create_task(stop.wait())
        log.info("serving %s at %s", config.model_path, url)
        async with announcement(url) if announcement else nullcontext():
            await asyncio.wait({stepping, stopping}, return_when=asyncio.FIRST_COMPLETED)
            # Samplers continue aborted requests at another service, after the tokens so far.
            server.stopping = True
            engine.scheduler.abort()
        if stepping.done():
            stepping.result()
        stepping.cancel()
    finally:
        await runner.cleanup()


class _Server:
    """The handlers of all routes of one engine."""

    def __init__(self, engine: LocalEngine) -> None:
        self.stopping = False
        self._engine = engine
        self._weights = WeightRoutes(engine)
        self._started = time.time()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_LARGEST_BODY, middlewares=[self._admit])
        routes: list[tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]]] = [
            ("POST", "/generate", self._generate),
            ("PUT", "/generate", self._generate),
            ("POST", "/pause_generation", self._pause),
            ("POST", "/continue_generation", self._continue),
            ("POST", "/abort_request", self._abort),
            ("POST", "/release_memory_occupation", self._release_memory),
            ("POST", "/resume_memory_occupation", self._resume_memory),
            ("POST", "/flush_cache", self._flush_cache),
            ("GET", "/flush_cache", self._flush_cache),
            ("GET", "/model_info", self._model_info),
            ("GET", "/server_info", self._server_info),
            ("GET", "/v1/loads", self._loads),
            ("GET", "/ready", self._ready),
            ("GET", "/health", self._health),
            ("GET", "/health_generate", self._health),
        ]
        for method, path, handler in routes:
            app.router.add_route(method, path, handler)
        self._weights.add_to(app)
        if self._engine.config.enable_metrics:
            # Here: without the flag nothing of it is loaded.
            from agentrl.inference.engine.engine_figures import EngineFigures
            from agentrl.metrics.exposure import PATH, metrics_handler

            app.router.add_get(PATH, metrics_handler([EngineFigures(self._engine)]))
        return app

    @web.middleware
    async def _admit(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Refuse a request without the key, before its body is read."""
        key = self._engine.config.api_key
        if key is None or request.path.startswith(_OPEN_TO_ALL):
            return await handler(request)
        if admits(request.headers.get("Authorization"), key):
            return await handler(request)
        return answer({"error": "Unauthorized"}, 401)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        engine = self._engine
        if self.stopping:
            return web.Response(status=503, text="the engine is stopping")
        try:
            body = parse_generate(orjson.loads(await request.read()), engine.limits, engine.text)
            if body.stream:
                return await self._stream(request, body.prompts[0])
            ended = await engine.generate(body.prompts)
        except orjson.JSONDecodeError as error:
            return answer({"error": f"the body is not JSON: {error}"}, 400)
        except BodyError as error:
            return answer({"error": str(error)}, 400)
        except RequestError as error:
            return answer({"error": {"message": str(error)}}, 400)
        answers = [
            generate_answer(live, prompt, engine.text, engine.scheduler.version)
            for live, prompt in zip(ended, body.prompts, strict=True)
        ]
        return answer(answers if body.many else answers[0])

    async def _stream(self, request: web.Request, prompt: PromptRequest) -> web.StreamResponse:
        """Send the output so far as server-sent events; the last one has the finish reason."""
        engine = self._engine
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        # A client may hang up during a write. This ends its generation and is no error.
        with suppress(ClientConnectionResetError):
            async with aclosing(engine.stream(prompt)) as states:
                async for live in states:
                    if not response.prepared:
                        await response.prepare(request)
                    event = generate_answer(live, prompt, engine.text, engine.scheduler.version)
                    end = b"" if live.finish is None else b"data: [DONE]\n\n"
                    await response.write(b"data: " + orjson.dumps(event) + b"\n\n" + end)
        return response

    async def _pause(self, request: web.Request) -> web.Response:
        body = await ControlBody.read(request)
        asked = body.optional_text("mode") or "abort"
        mode = PAUSE_MODES.get(asked)
        if mode is None:
            raise bad_request(f"mode must be one of {', '.join(PAUSE_MODES)}, got {asked!r}")
        self._engine.pause(mode)
        return answer({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await ControlBody.read(request)
        try:
            self._engine.resume()
        except RequestError as error:
            return answer({"error": {"message": str(error)}}, 400)
        return answer({"message": "Generation continued successfully.", "status": "ok"})

    async def _release_memory(self, request: web.Request) -> web.Response:
        return await self._memory(request, self._engine.release_memory)

    async def _resume_memory(self, request: web.Request) -> web.Response:
        return await self._memory(request, self._engine.resume_memory)

    async def _memory(self, request: web.Request, change: Callable[[], None]) -> web.Response:
        """Change all memory or none. A request that would crash SGLang is refused."""
        await ControlBody.read(request)
        try:
            change()
        except RequestError as error:
            return answer({"error": {"message": str(error)}}, 400)
        return answer(None)

    async def _abort(self, request: web.Request) -> web.Response:
        body = await ControlBody.read(request)
        rid = body.optional_text("rid")
        if body.flag("abort_all", False):
            self._engine.scheduler.abort()
        elif rid:
            self._engine.scheduler.abort(rid)
        return web.Response()

    async def _flush_cache(self, request: web.Request) -> web.Response:
        if self._engine.scheduler.flush_cache():
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    async def _model_info(self, request: web.Request) -> web.Response:
        engine = self._engine
        config = engine.runner.model.config
        return answer(
            {
                "model_path": str(engine.model_path),
                "served_model_name": str(engine.config.model_path),
                "tokenizer_path": str(engine.config.model_path),
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": engine.scheduler.version,
                "load_format": "safetensors",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": config.model_type,
                "architectures": config.architectures,
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        engine = self._engine
        arguments = dataclasses.asdict(engine.config) | {
            "model_path": str(engine.config.model_path),
            "api_key": None,  # users paste the output of this route
            "context_length": engine.limits.context_length,
            "max_running_requests": engine.scheduler.max_running,
            "max_total_tokens": engine.runner.total_tokens,
            "weight_version": engine.scheduler.version,
            "startup_time": self._started,
            "internal_states": [dataclasses.asdict(engine.scheduler.counters)],
            "tp_size": 1,
            "dp_size": 1,
            "version": "agentrl-engine",
        }
        return answer(arguments)

    async def _loads(self, request: web.Request) -> web.Response:
        engine, scheduler = self._engine, self._engine.scheduler
        counters, total = scheduler.counters, engine.runner.total_tokens
        load = {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": scheduler.running,
            "num_waiting_reqs": scheduler.waiting,
            "num_used_tokens": scheduler.running_tokens,
            "num_total_tokens": scheduler.running_tokens,
            "max_total_num_tokens": total,
            "max_running_requests": scheduler.max_running,
            "token_usage": scheduler.running_tokens / total,
            "gen_throughput": engine.tokens_per_second if scheduler.has_work else 0.0,
            "cache_hit_rate": counters.cached_tokens / max(1, counters.prompt_tokens),
            "memory": {
                "kv_cache_gb": engine.runner.cache_bytes / 2**30,
                "token_capacity": total,
            },
            # A slot has room for the longest request, so none is retracted for lack of memory.
            "queues": {"waiting": scheduler.waiting, "paused": 0, "retracted": 0},
        }
        return answer({"timestamp": time.time(), "version": "agentrl-engine", "loads": [load]})

    async def _ready(self, request: web.Request) -> web.Response:
        paused = self._engine.scheduler.paused is not None
        return web.Response(status=503 if self.stopping or paused else 200)

    async def _health(self, request: web.Request) -> web.Response:
        """Generate one token. Answers 503 if that takes too long, for example during a pause."""
        probe = PromptRequest(
            rid=f"HEALTH_CHECK_{uuid.uuid4().hex}",
            input_ids=[0],
            sampling=TokenSampling(greedy=True),
            max_new_tokens=1,
            end_ids=frozenset(),
            stop_strings=None,
            return_logprob=False,
            skip_special_tokens=True,
            trim_stop=True,
        )
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                await self._engine.generate([probe])
        except TimeoutError:
            return web.Response(status=503)
        return web.Response(status=503 if self.stopping else 200)
