"""llama.cpp's own HTTP server, from the wheel `xllamacpp`, as a process: `python -m din_extproc.tools.demo.llamacpp MODEL --port 8000`.

Rule: one model per process. Prints `LISTENING http://host:port` when it is ready; SIGTERM and SIGINT end it.
"""

import argparse
import signal
import threading
from collections.abc import Sequence

import xllamacpp

_BATCH_LIMIT = 2048


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until a signal."""
    options = _parse(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server = xllamacpp.Server(_make_params(options))
    print("LISTENING", server.listening_address, flush=True)  # noqa: T201 - the parent process waits for this line
    # An unlimited wait would keep Python from running its signal handlers.
    while not stop.wait(0.2):
        pass


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m din_extproc.tools.demo.llamacpp", description="Serve one GGUF model with llama.cpp")
    parser.add_argument("model", help="the GGUF file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--alias", default="model", help="the model's name in answers")
    parser.add_argument("--ctx", type=int, default=8192, help="context tokens, shared by the parallel requests")
    parser.add_argument("--parallel", type=int, default=4, help="requests at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--embedding", action="store_true", help="serve embeddings instead of text")
    parser.add_argument("--rerank", action="store_true", help="serve rerank instead of text")
    parser.add_argument("--pooling", default="", help="none, mean, cls or last; default: the model's own")
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--verbosity", type=int, default=0)
    return parser.parse_args(arguments)


def _make_params(options: argparse.Namespace) -> xllamacpp.CommonParams:
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.hostnames = [options.host]
    params.port = options.port
    params.model_alias = {options.alias}
    params.n_ctx = options.ctx
    params.n_parallel = options.parallel
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.n_gpu_layers = 0
    params.warmup = False
    params.ui = False
    params.use_jinja = True
    params.n_threads_http = 8
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.endpoint_props = True
    params.verbosity = options.verbosity
    if options.api_key:
        params.api_keys = options.api_key
    if options.embedding or options.rerank:
        params.embedding = True
        params.n_batch = params.n_ubatch = min(options.ctx, _BATCH_LIMIT)
    if options.rerank:
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    elif options.pooling:
        params.pooling_type = getattr(xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{options.pooling.upper()}")
    return params


if __name__ == "__main__":
    main()
