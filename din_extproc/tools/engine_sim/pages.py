"""The pages of a modelled engine: health, load, metrics, models, tokens; and its two switches, `/_faults` and `/_seen`.

Rule: no page starts work on the engine.
"""

import time
from typing import Any
from zlib import crc32

import msgspec
from aiohttp import web

from din_extproc.tools.engine_model.errors import EngineFailure, refuse
from din_extproc.tools.engine_model.faults import Fault, FaultBoard, parse_faults
from din_extproc.tools.engine_model.fields import check_fields, decode_body
from din_extproc.tools.engine_model.model import ModelSpec
from din_extproc.tools.engine_model.tokens import SimulatedTokenizer, chat_prompt
from din_extproc.tools.engine_sim.loop import EngineLoop
from din_extproc.tools.engine_sim.request_history import RequestHistory

HEADERS = {"server": "uvicorn", "vary": "Origin"}


class EnginePages:
    """The read-only pages and the switches of one engine."""

    def __init__(self, model: ModelSpec, tokenizer: SimulatedTokenizer, faults: FaultBoard, seen: RequestHistory, loop: EngineLoop) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._faults = faults
        self._seen = seen
        self._loop = loop

    def routes(self) -> list[web.RouteDef]:
        """Every page's route."""
        return [
            web.get("/health", self._health),
            web.get("/load", self._load),
            web.get("/metrics", self._render_metrics),
            web.get("/version", self._version),
            web.get("/v1/models", self._models),
            web.get("/_faults", self._show_faults),
            web.post("/_faults", self._set_faults),
            web.get("/_seen", self._show_seen),
            web.delete("/_seen", self._clear_seen),
        ]

    async def _health(self, _request: web.Request) -> web.Response:
        """Return an empty page as vLLM does, with the queue's length in two headers."""
        lie = self._faults.draw("/health").get("health")
        engine = self._loop.engine
        depth = {"x-requests-running": str(len(engine.running)), "x-requests-waiting": str(len(engine.waiting))}
        return web.Response(status=lie.status if lie else 200, headers={**HEADERS, **depth})

    async def _load(self, _request: web.Request) -> web.Response:
        return _json({"server_load": self._seen.in_flight})

    async def _version(self, _request: web.Request) -> web.Response:
        return _json({"version": "0.32.0"})

    async def _render_metrics(self, _request: web.Request) -> web.Response:
        text = self._loop.metrics.render(self._loop.engine)
        content_type = "text/plain; version=1.0.0; charset=utf-8"
        return web.Response(body=text.encode(), headers={**HEADERS, "content-type": content_type})

    async def _models(self, _request: web.Request) -> web.Response:
        created = int(time.time())
        name = self._model.name
        permission = {"id": f"modelperm-{crc32(name.encode()):016x}", "object": "model_permission", "created": created}
        permission |= {"allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True, "allow_search_indices": False}
        permission |= {"allow_view": True, "allow_fine_tuning": False, "organization": "*", "group": None, "is_blocking": False}
        card = {"object": "model", "created": created, "owned_by": "vllm", "root": self._model.root, "parent": None}
        card |= {"max_model_len": self._model.max_model_len, "permission": [permission]}
        return _json({"object": "list", "data": [{"id": name, **card} for name in self._model.names]})

    async def tokenize(self, request: web.Request, *_: object) -> web.Response:
        """Answer POST /tokenize."""
        body = decode_body(await request.read(), request.headers.get("content-type", ""))
        fields = body if isinstance(body, EngineFailure) else check_fields(body, {"prompt": "str", "messages": "list"}, ())
        if isinstance(fields, EngineFailure):
            return answer_failure(fields)
        text = fields["prompt"] if fields["messages"] is None else chat_prompt(fields["messages"], media_tokens=1)[0]
        ids = self._tokenizer.ids(text or "")
        return _json({"count": len(ids), "max_model_len": self._model.max_model_len, "tokens": ids, "token_strs": None})

    async def _show_faults(self, _request: web.Request) -> web.Response:
        return _json([{**msgspec.to_builtins(fault), "left": left} for fault, left in self._faults.left])

    async def _set_faults(self, request: web.Request) -> web.Response:
        """Replace the faults: `{"faults": "reset:after=3" or [objects], "seed": 0}`."""
        body = decode_body(await request.read(), "application/json")
        if isinstance(body, EngineFailure):
            return answer_failure(body)
        try:
            given = body.get("faults", [])
            faults = parse_faults(given) if isinstance(given, str) else msgspec.convert(given, tuple[Fault, ...])
            self._faults.replace(faults, int(body.get("seed", 0)))
        except (ValueError, TypeError) as error:
            return answer_failure(refuse(400, str(error), param="faults"))
        return await self._show_faults(request)

    async def _show_seen(self, request: web.Request) -> web.Response:
        last = request.query.get("last", "100")
        if not last.isdecimal():
            return answer_failure(refuse(400, "last is a number", param="last"))
        return _json(self._seen.report(int(last)))

    async def _clear_seen(self, _request: web.Request) -> web.Response:
        self._seen.clear()
        return _json({})


def answer_failure(failure: EngineFailure) -> web.Response:
    """Return an error answer with the engine's headers."""
    headers = [*HEADERS.items(), *failure.headers]
    if failure.content_type:
        headers.append(("content-type", failure.content_type))
    return web.Response(status=failure.status, body=failure.body, headers=headers)


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", headers=HEADERS)
