"""HTTP routes for weight updates from disk, from shared memory and from a process group."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from aiohttp import web
from torch import Tensor

from agentrl.inference.engine.assembly import WeightsError
from agentrl.inference.engine.control import ControlBody, bad_request, done
from agentrl.inference.engine.engine import LocalEngine
from agentrl.inference.engine.weight_session import WeightSession
from agentrl.inference.engine.weights import CacheNotFlushed, make_assembly, read_weights


class WeightRoutes:
    """The handlers of one engine."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._assembly = make_assembly(engine.runner.model, engine.config.model_path)
        self._session = WeightSession(self._assembly, engine.runner.device)

    def add_to(self, app: web.Application) -> None:
        """Register all routes."""
        routes: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = {
            "/update_weights_from_disk": self._from_disk,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_tensor": self._from_tensor,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/update_weights_from_distributed": self._from_distributed,
        }
        for path, handler in routes.items():
            app.router.add_post(path, handler)

    async def _from_disk(self, request: web.Request) -> web.Response:
        body = await ControlBody.read(request)
        folder = Path(body.text("model_path"))
        read = partial(read_weights, self._engine.runner.model, self._assembly, folder)
        try:
            said = await self._update(body, read)
        except CacheNotFlushed as error:
            self._engine.model_path = folder
            return done(False, str(error), num_paused_requests=0)
        except WeightsError as error:
            return done(False, f"Failed to update weights: {error}", num_paused_requests=0)
        self._engine.model_path = folder
        return done(True, f"Succeeded to update model weights.{said}", num_paused_requests=0)

    async def _begin(self, request: web.Request) -> web.Response:
        await ControlBody.read(request)
        try:
            self._session.begin()
        except WeightsError as error:
            return done(False, str(error))
        return done(True, "Success")

    async def _end(self, request: web.Request) -> web.Response:
        await ControlBody.read(request)
        try:
            self._session.end()
        except WeightsError as error:
            return done(False, str(error))
        return done(True, "Success")

    async def _init_group(self, request: web.Request) -> web.Response:
        body = await ControlBody.read(request)
        join = partial(
            self._session.join,
            body.optional_text("group_name") or "weight_update_group",
            body.text("master_address"),
            body.integer("master_port"),
            body.integer("rank_offset"),
            body.integer("world_size"),
            body.optional_text("backend") or "nccl",
        )
        try:
            await asyncio.to_thread(join)
        except WeightsError as error:
            return done(False, str(error))
        return done(True, "Succeeded to initialize custom process group.")

    async def _destroy_group(self, request: web.Request) -> web.Response:
        body = await ControlBody.read(request)
        try:
            self._session.leave(body.optional_text("group_name") or "weight_update_group")
        except WeightsError as error:
            return done(False, str(error))
        return done(True, "Succeeded to destroy custom process group.")

    async def _from_tensor(self, request: web.Request) -> web.Response:
        body = await ControlBody.read(request)
        texts = body.texts("serialized_named_tensors")
        if not self._session.open:
            return _outside_session("update_weights_from_tensor")
        try:
            said = await self._update_in_session(body, partial(self._session.from_shared, texts))
        except WeightsError as error:
            return done(False, str(error))
        return done(True, f"Success{said}")

    async def _from_distributed(self, request: web.Request) -> web.Response:
        body = await ControlBody.read(request)
        names, dtypes = body.texts("names"), body.texts("dtypes")
        shapes = body.shapes("shapes")
        if not len(names) == len(dtypes) == len(shapes):
            raise bad_request("names, dtypes and shapes must be equally many")
        group = body.optional_text("group_name") or "weight_update_group"
        if not self._session.open:
            return _outside_session("update_weights_from_distributed")
        receive = partial(self._session.from_group, group, names, dtypes, shapes)
        try:
            said = await self._update_in_session(body, receive)
        except WeightsError as error:
            return done(False, str(error))
        return done(True, f"Succeeded to update parameter online.{said}")

    async def _update_in_session(
        self, body: ControlBody, read: Callable[[], dict[str, Tensor]]
    ) -> str:
        with self._session.request():
            return await self._update(body, read)

    async def _update(self, body: ControlBody, read: Callable[[], dict[str, Tensor]]) -> str:
        return await self._engine.update_weights(
            read,
            body.optional_text("weight_version"),
            flush_cache=body.flag("flush_cache", True),
            abort_all=body.flag("abort_all_requests", False),
        )


def _outside_session(request: str) -> web.Response:
    return done(False, f"{request} must run between begin_weight_update() and end_weight_update()")
