"""A no-op ext_proc server on the product's wire: the cost of the transport alone.

Run: python -m tests.bench.noop_wire unix:/path ENDPOINT
"""

import asyncio
import gc
import sys

import uvloop

from din_extproc.domain.request import RequestHead
from din_extproc.domain.response import PASS, ResponseHead, Treatment
from din_extproc.domain.verdict import ImmediateResponse, Send, Verdict
from din_extproc.edge.grpc.ext_proc import ExtProcService
from din_extproc.edge.grpc.h2_server import H2Server
from tests.bench.harness import pin_self

_BODY_LIMIT = 32 << 20


class _Constant:
    """Both the handler factory and the handler of every stream: the same verdict for each request."""

    def __init__(self, endpoint: str) -> None:
        self._verdict = Send(
            cluster="pool",
            endpoints=(endpoint,),
            request_headers=(("x-din-trace-id", "0123456789abcdef0123456789abcdef"), ("x-din-model", "physical")),
            response_headers=(),
            metadata={},
        )

    def create_handler(self) -> "_Constant":
        return self

    async def decide(self, _head: RequestHead, _body: bytes) -> Verdict:
        return self._verdict

    def failed(self, error: BaseException) -> ImmediateResponse:
        raise error

    def on_response(self, _head: ResponseHead) -> Treatment:
        return PASS

    def on_response_failure(self, error: Exception) -> None:
        raise error

    def ended(self, *, cut: bool = True) -> None:
        """Nothing was taken."""


async def _serve(address: str, endpoint: str) -> None:
    server = H2Server([ExtProcService(_Constant(endpoint))], max_body_bytes=_BODY_LIMIT)
    await server.start(address)
    gc.collect()
    gc.freeze()
    print("LISTENING", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    pin_self("server")
    uvloop.run(_serve(sys.argv[1], sys.argv[2]))
