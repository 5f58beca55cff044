"""The measuring HTTP client keeps connections to gateways only."""

import pytest
from aiohttp import web

from din_extproc.tools.http_client import OutsideClient


@pytest.mark.parametrize(("key", "connections"), [("a key", 1), ("", 3)])
async def test_a_node_gets_a_connection_for_each_request_because_engines_end_kept_ones_as_they_like(key, connections):
    peers = set()

    async def answer(request: web.Request) -> web.Response:
        peers.add(request.transport.get_extra_info("peername"))
        return web.Response(text=request.headers.get("authorization", ""))

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with OutsideClient(f"http://127.0.0.1:{runner.addresses[0][1]}", key, 5.0) as client:
            outcomes = [await client.send("POST", "/", {}, b"x") for _ in range(3)]
    finally:
        await runner.cleanup()
    assert [outcome.body.decode() for outcome in outcomes] == [f"Bearer {key}" if key else ""] * 3
    assert len(peers) == connections
