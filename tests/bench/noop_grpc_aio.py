"""A no-op ext_proc server on `grpc.aio` with an async generator and constant replies.

Run: python -m tests.bench.noop_grpc_aio unix:/path
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from din_extproc._proto.envoy.config.core.v3.base_pb2 import HeaderValueOption
from din_extproc._proto.envoy.service.ext_proc.v3.external_processor_pb2 import HeadersResponse, ProcessingRequest, ProcessingResponse
from tests.bench.harness import pin_self

_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_LIMIT = 64 << 20


def _routed() -> bytes:
    reply = ProcessingResponse()
    common = reply.request_body.response
    common.clear_route_cache = True
    for name in ("x-din-cluster", "x-din-endpoint", "x-din-trace-id", "x-din-model"):
        option = common.header_mutation.set_headers.add(append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key, option.header.raw_value = name, b"backend"
    return reply.SerializeToString()


_REPLIES = {
    "request_headers": ProcessingResponse(request_headers=HeadersResponse()).SerializeToString(),
    "request_body": _routed(),
    "response_headers": ProcessingResponse(response_headers=HeadersResponse()).SerializeToString(),
}


async def process(requests: AsyncIterator[Any], _context: Any) -> AsyncIterator[bytes]:
    """The method `Process`."""
    async for request in requests:
        yield _REPLIES[request.WhichOneof("request")]


async def _serve(address: str) -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", _LIMIT), ("grpc.max_send_message_length", _LIMIT)])
    handler = grpc.stream_stream_rpc_method_handler(process, request_deserializer=ProcessingRequest.FromString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Process": handler}),))
    server.add_insecure_port(address)
    await server.start()
    print("LISTENING", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    pin_self("server")
    asyncio.run(_serve(sys.argv[1]))
