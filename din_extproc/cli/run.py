"""Commands that run a process until it is stopped: `serve`, `node`, `envoy`, `demo`, `engine-sim`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from din_extproc.cli.options import DAY_S, DEFAULT_CONFIG, Config, LogLevel, fail_on, load_settings, not_empty, number, port
from din_extproc.edge.telemetry.logs import configure
from din_extproc.tools.engine_model.faults import KINDS

_FASTEST = 1e9


def serve(
    config: Config = DEFAULT_CONFIG,
    drain_s: Annotated[float, number("Seconds that open exchanges may take to end after SIGTERM.", most=DAY_S)] = 20.0,
    log_level: LogLevel = "info",
    transport: Annotated[Literal["wire", "grpcio"], typer.Option(help="The built-in HTTP/2 server, or grpcio's (slower).")] = "wire",
    worker: Annotated[int | None, typer.Option(hidden=True)] = None,
    channel: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the sidecar beside Envoy.

    SIGHUP reloads the configuration, SIGUSR1 replaces the workers one by one, SIGTERM drains and stops.
    """
    from din_extproc.roles.serve.main import run  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.serve.options import ServeOptions  # noqa: PLC0415

    configure(log_level)
    options = ServeOptions(config=config, transport=transport, drain_s=drain_s, log_level=log_level, worker=worker, channel=channel)
    raise typer.Exit(run(options))


def node(config: Config = Path("node.yaml"), log_level: LogLevel = "info") -> None:
    """Run the agent beside an inference engine.

    It verifies the engine's weights, registers the node and sends heartbeats with its state and load.
    """
    from din_extproc.roles.node.main import NodeOptions, run  # noqa: PLC0415 - the other commands start without it

    configure(log_level)
    raise typer.Exit(run(NodeOptions(config=config)))


def envoy(
    file: Annotated[
        Path, typer.Argument(help="Envoy's configuration, as `render envoy` writes it.", exists=True, dir_okay=False, readable=True)
    ] = Path("envoy.yaml"),
    config: Config = DEFAULT_CONFIG,
    concurrency: Annotated[int, typer.Option(help="Envoy's threads; 0: one per core.", min=0, max=1024)] = 0,
    drain_s: Annotated[float, number("Seconds that open requests may take to end in an Envoy that is replaced.", most=DAY_S)] = 60.0,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="Envoy's log level.")] = "warning",
) -> None:
    """Run this machine's Envoy, with hot restart.

    SIGHUP starts a successor that takes over without cutting a request; SIGTERM drains and stops.
    """
    from din_extproc.roles.operate.envoy import EnvoyOptions, run  # noqa: PLC0415 - the other commands start without it

    configure("info")
    admin = load_settings(config).envoy.admin
    raise typer.Exit(run(EnvoyOptions(file=file, admin=admin, concurrency=concurrency, drain_s=drain_s, log_level=log_level)))


def demo(
    check: Annotated[bool, typer.Option("--check", help="Send a client's requests, check the answers, then stop.")] = False,  # noqa: FBT002
    port: Annotated[int, port("Envoy's port on loopback; 0: a free one.", least=0)] = 0,
    simulated: Annotated[bool, typer.Option("--simulated", help="Use engine simulators instead of real models.")] = False,  # noqa: FBT002
    traffic: Annotated[bool, typer.Option("--traffic", help="Send light traffic, for the dashboard.")] = False,  # noqa: FBT002
) -> None:
    """Run a whole network on this machine.

    It starts Envoy, Redis, the sidecar and small real models on loopback; Ctrl-C stops them.
    """
    from din_extproc.tools.demo.demo import DemoOptions, run  # noqa: PLC0415 - the other commands start without it

    raise typer.Exit(run(DemoOptions(check=check, port=port, simulated=simulated, traffic=traffic)))


def engine_sim(
    model: Annotated[str, typer.Option(help="The model's own name.")] = "sim-model",
    served_model: Annotated[list[str] | None, typer.Option(help="A name that requests may use; repeatable.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", callback=not_empty)] = "127.0.0.1",
    port: Annotated[int, port("Port to listen on; 0: a free one.", least=0)] = 0,
    api: Annotated[Literal["vllm", "ollama", "tgi", "triton", "tensorrt_llm"], typer.Option(help="The engine whose API it has.")] = "vllm",
    runner: Annotated[Literal["generate", "pooling"], typer.Option(help="A chat model, or one for embeddings and rerank.")] = "generate",
    max_model_len: Annotated[int, typer.Option(help="Context length in tokens: prompt and output together.")] = 8192,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = 64,
    prefill_rate: Annotated[float, number("Prompt tokens per second.", least=0.001, most=_FASTEST)] = 8000.0,
    decode_rate: Annotated[float, number("Output tokens per second of one stream alone.", least=0.001, most=_FASTEST)] = 60.0,
    kv_tokens: Annotated[int, typer.Option(help="Capacity of the KV cache in tokens.")] = 131072,
    tokenizer: Annotated[str, typer.Option(help="A folder with tokenizer.json instead of the built-in one.")] = "",
    faults: Annotated[
        str,
        typer.Option(help=f"`KIND:name=value,...; KIND...`, such as `reset:after=3,count=2; latency:ms=200`. Kinds: {', '.join(KINDS)}."),
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of faults that have a probability.")] = 0,
    *,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache", help="Blocks of earlier prompts need no prefill while in memory.")
    ] = False,
) -> None:
    """Run a modelled inference engine.

    It answers over HTTP as vLLM, or another engine, does under load, and has switches for faults.
    """
    from din_extproc.tools.engine_sim.main import EngineSimOptions, run  # noqa: PLC0415 - the other commands start without it

    with fail_on(ValueError, OSError):
        run(
            EngineSimOptions(
                model=model,
                served_model=tuple(served_model or ()),
                host=host,
                port=port,
                api=api,
                runner=runner,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                prefill_rate=prefill_rate,
                decode_rate=decode_rate,
                kv_tokens=kv_tokens,
                prefix_cache=prefix_cache,
                tokenizer=tokenizer,
                faults=faults,
                seed=seed,
            )
        )
