"""The demo's checks pass for a correct gateway, and each finds its fault."""

import contextlib
import json

import pytest
from aiohttp import web

from din_extproc.tools.demo.check import DemoCheckFailed, DemoClient
from din_extproc.tools.demo.plan import TRIAL_RPM
from tests.unit.tools.demo.test_plan import plan

LIMITS = {f"x-ratelimit-{part}-{kind}": "1" for part in ("limit", "remaining", "reset") for kind in ("requests", "tokens")}
TITLES = ["chat", "stream", "stream_with_usage", "embeddings", "unknown_model", "wrong_key", "over_limit", "node_dies"]


class FakeGateway:
    """Answers as the gateway should, but for one fault on purpose."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.alive = ["node-a", "node-b"]
        self.trials = 0
        self.turn = 0

    async def end_node(self, name: str) -> None:
        if self.fault != "zombie":
            self.alive.remove(name)

    @contextlib.asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", self.chat), web.post("/v1/embeddings", self.embeddings)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()

    def headers(self) -> dict[str, str]:
        self.turn += 1
        found = {"x-din-node-id": self.alive[self.turn % len(self.alive)], "x-din-trace-id": "1", "x-din-model-version": "2.0.0", **LIMITS}
        return {} if self.fault == "bare" else found

    def refuse(self, status: int, code: str) -> web.Response:
        headers = {**LIMITS, "retry-after": "0" if self.fault == "spin" else "7"}
        return web.json_response({"error": {"code": "oops" if self.fault == "code" else code}}, status=status, headers=headers)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        key = request.headers["authorization"]
        if key.endswith("_wrong"):
            return self.refuse(401, "invalid_api_key")
        if body["model"] == "no-such-model":
            return self.refuse(404, "model_not_found")
        if "_trial_" in key:
            self.trials += 1
            if self.trials > TRIAL_RPM and self.fault != "unlimited":
                return self.refuse(429, "rate_limit_exceeded")
        if body.get("stream"):
            return self.stream(body)
        content = "" if self.fault == "empty" else "hello"
        answer = {"choices": [{"message": {"content": content}}], "usage": {"completion_tokens": 1}}
        return web.json_response(answer, headers=self.headers())

    def stream(self, body) -> web.Response:
        chunks = [{"choices": [{"delta": {"content": word}}]} for word in ("a", "b", "c")]
        usage = {"choices": [], "usage": {"completion_tokens": 2 if self.fault == "short" else 4}}
        if "stream_options" in body or self.fault == "leak":
            chunks.append(usage)
        events = [json.dumps(chunk) for chunk in chunks] + ([] if self.fault == "truncated" else ["[DONE]"])
        text = "".join(f"data: {event}\n\n" for event in events)
        return web.Response(text=text, content_type="text/event-stream", headers=self.headers())

    async def embeddings(self, request: web.Request) -> web.Response:
        texts = (await request.json())["input"]
        data = [{"embedding": [0.1]} for _ in texts][: 1 if self.fault == "one" else None]
        return web.json_response({"data": data}, headers=self.headers())


async def play(gateway: FakeGateway, tmp_path, names=TITLES) -> list[str]:
    async with gateway.serving() as port:
        made = plan(tmp_path)
        served = type(made)(**{name: getattr(made, name) for name in made.__struct_fields__} | {"listener_port": port})
        async with DemoClient(served, gateway.end_node) as player:
            by_name = {check.__name__: check for _, check in player.checks()}
            assert list(by_name) == TITLES
            return [await by_name[name]() for name in names]


async def test_every_check_holds_against_a_gateway_that_does_right(tmp_path):
    results = await play(FakeGateway(), tmp_path)
    assert len(results) == len(TITLES)
    assert all(results)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("bare", "chat"),
        ("empty", "chat"),
        ("leak", "stream"),
        ("truncated", "stream"),
        ("short", "stream_with_usage"),
        ("one", "embeddings"),
        ("code", "unknown_model"),
        ("code", "wrong_key"),
        ("unlimited", "over_limit"),
        ("spin", "over_limit"),
        ("zombie", "node_dies"),
    ],
)
async def test_a_check_finds_the_fault_that_it_is_there_for(fault, check, tmp_path):
    with pytest.raises(DemoCheckFailed):
        await play(FakeGateway(fault), tmp_path, [check])
