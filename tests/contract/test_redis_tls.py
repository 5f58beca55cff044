"""Redis behind TLS: only a client that trusts it and has the required certificate counts there; others report the reason."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

from din_extproc.edge.redis.link import Link
from din_extproc.edge.redis.topology import make_locator
from tests.support.certificates import Authority


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def behind_tls(port: int, context: ssl.SSLContext) -> AsyncIterator[int]:
    """A port that speaks TLS for the server at that one."""

    async def both(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_carry(reader, far_writer), _carry(far_reader, writer))

    server = await asyncio.start_server(both, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def answers(url: str) -> tuple[bool, str]:
    link = Link(make_locator(url), (), timeout_ms=5000)
    try:
        good = await link.start()
        return good and await link.call(b"PING") == b"PONG", link.state.reason
    finally:
        await link.close()


async def test_redis_behind_mutual_tls_is_reached_with_the_right_files_only(redis_servers, tmp_path):
    authority, other_authority = Authority(tmp_path), Authority(tmp_path, "stranger")
    port = authority.issue("redis", "localhost")
    own, odd = authority.issue("din", "din"), other_authority.issue("odd", "din")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(port["cert"], port["key"])
    context.load_verify_locations(str(authority.file))
    context.verify_mode = ssl.CERT_REQUIRED
    async with behind_tls(redis_servers["valkey8"].port, context) as number:
        client_files = f"ssl_certfile={own['cert']}&ssl_keyfile={own['key']}"
        base = f"rediss://localhost:{number}/0?ssl_ca_certs={authority.file}"
        assert await answers(f"{base}&{client_files}") == (True, "")
        for url in (
            base,
            f"{base}&ssl_certfile={odd['cert']}&ssl_keyfile={odd['key']}",
            f"rediss://localhost:{number}/0?{client_files}",
            f"rediss://localhost:{number}/0?ssl_ca_certs={other_authority.file}&{client_files}",
            f"rediss://127.0.0.1:{number}/0?ssl_ca_certs={authority.file}&{client_files}",
            f"redis://localhost:{number}/0",
        ):
            good, reason = await answers(url)
            assert not good
            assert reason
