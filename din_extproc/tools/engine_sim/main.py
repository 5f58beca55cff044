"""The role of `engine-sim`: one modelled engine on one port, until SIGTERM or SIGINT."""

import asyncio
import signal
from pathlib import Path
from typing import Literal

import uvloop
from msgspec import Struct

from din_extproc.tools.engine_model.engine import EngineSpec
from din_extproc.tools.engine_model.faults import FaultBoard, parse_faults
from din_extproc.tools.engine_model.model import ModelSpec
from din_extproc.tools.engine_model.tokens import PatternTokenizer
from din_extproc.tools.engine_sim.server import EngineServer
from din_extproc.tools.engine_sim.tokenizer_folder import FolderTokenizer


class EngineSimOptions(Struct, frozen=True, kw_only=True):
    """The command line of `din-extproc engine-sim`. Rates in tokens per second, lengths in tokens."""

    host: str = "127.0.0.1"
    port: int = 0
    """The port; 0: a free one."""
    model: str = "sim-model"
    served_model: tuple[str, ...] = ()
    """Names that requests may use; () is the model's own."""
    api: Literal["vllm", "ollama", "tgi", "triton", "tensorrt_llm"] = "vllm"
    """The engine whose API it has."""
    runner: Literal["generate", "pooling"] = "generate"
    max_model_len: int = 8192
    max_num_seqs: int = 64
    prefill_rate: float = 8000.0
    decode_rate: float = 60.0
    """Output tokens per second of one stream alone."""
    batch_slowdown: float = 0.02
    """Share by which each further stream lengthens every token's time."""
    kv_tokens: int = 131072
    prefix_cache: bool = False
    """Whether blocks of earlier prompts need no prefill while they are in memory (vLLM's `--enable-prefix-caching`)."""
    tokenizer: str = ""
    """A folder with tokenizer.json; "" is the built-in tokenizer."""
    faults: str = ""
    """`KIND:name=value,...; KIND...`, see `engine_model/faults.py`."""
    seed: int = 0
    """Seed of faults that have a probability."""
    api_key: str = ""
    auto_tool_choice: bool = False
    reasoning: Literal["", "reasoning", "reasoning_content"] = ""
    """The key of the reasoning that a chat begins with; "": none."""
    media_tokens: int = 0
    """Tokens of an image; 0: a text model."""
    dimensions: int = 384


def build(options: EngineSimOptions) -> EngineServer:
    """Return the server of these options, not started yet.

    Raises:
        ValueError: an option or fault is invalid; the message says which.
    """
    spec = EngineSpec(
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        prefill_rate=options.prefill_rate,
        decode_rate=options.decode_rate,
        batch_slowdown=options.batch_slowdown,
        kv_tokens=options.kv_tokens,
    )
    model = ModelSpec(
        root=options.model,
        served_names=options.served_model,
        max_model_len=options.max_model_len,
        api=options.api,
        runner=options.runner,
        auto_tool_choice=options.auto_tool_choice,
        reasoning=options.reasoning,
        media_tokens=options.media_tokens,
        cache_block=spec.block_size if options.prefix_cache else 0,
        dimensions=options.dimensions,
        api_key=options.api_key,
    )
    tokenizer = FolderTokenizer(Path(options.tokenizer)) if options.tokenizer else PatternTokenizer()
    return EngineServer(spec, model, tokenizer, FaultBoard(parse_faults(options.faults), options.seed))


def run(options: EngineSimOptions) -> None:
    """Serve until SIGTERM or SIGINT. Prints `LISTENING http://host:port` when ready.

    Raises:
        ValueError: an option is invalid.
        OSError: the address is taken.
    """
    uvloop.run(_serve(options))


async def _serve(options: EngineSimOptions) -> None:
    server = build(options)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    port = await server.start(options.host, options.port)
    print(f"LISTENING http://{options.host}:{port}", flush=True)  # noqa: T201 - the parent process waits for this line
    try:
        await stop.wait()
    finally:
        await server.stop()
