"""The command line: parse, call a role, print.

Rule: no logic here. Exit codes: 0, 1 when the answer is no, 2 for a wrong call; every error is one line.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from din_extproc import __version__
from din_extproc.cli.bench import bench_app
from din_extproc.cli.keys import keys_app
from din_extproc.cli.options import DAY_S, DEFAULT_CONFIG, Config, Json, amount, fail, not_empty, port, print_json, settings_of
from din_extproc.cli.render import render_app
from din_extproc.cli.simulate import simulate
from din_extproc.cli.tenants import tenants, usage
from din_extproc.edge.telemetry.logs import configure
from din_extproc.settings.check import check as check_file
from din_extproc.tools.engine_model.faults import KINDS

_FASTEST = 1e9

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="An Envoy sidecar that routes LLM requests to GPU nodes.",
)
app.add_typer(render_app, name="render")
app.add_typer(keys_app, name="keys")
app.add_typer(bench_app, name="bench")
app.command()(tenants)
app.command()(usage)
app.command()(simulate)
audit_app = typer.Typer(no_args_is_help=True, help="The audit log.")
app.add_typer(audit_app, name="audit")


def main() -> None:
    """The console script."""
    app()


def _version(wanted: bool) -> None:  # noqa: FBT001 - typer's callback
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(_version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False) -> None:  # noqa: FBT002
    pass


@app.command()
def serve(
    config: Config = DEFAULT_CONFIG,
    drain_s: Annotated[float, amount("Seconds that open exchanges may go on after SIGTERM.", most=DAY_S)] = 20.0,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="What is logged, as JSON lines on stderr.")
    ] = "info",
    transport: Annotated[Literal["wire", "grpcio"], typer.Option(help="Our own HTTP/2, or grpcio's (slower).")] = "wire",
    worker: Annotated[int | None, typer.Option(hidden=True)] = None,
    channel: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the sidecar beside Envoy."""
    from din_extproc.roles.serve.main import run  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.serve.options import ServeOptions  # noqa: PLC0415

    configure(log_level)
    options = ServeOptions(config=config, transport=transport, drain_s=drain_s, log_level=log_level, worker=worker, channel=channel)
    raise typer.Exit(run(options))


@app.command()
def node(
    config: Config = Path("node.yaml"),
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="What is logged, as JSON lines on stderr.")
    ] = "info",
) -> None:
    """Run the agent beside an engine: verify its weights, register it, tell how it does."""
    from din_extproc.roles.node.main import NodeOptions, run  # noqa: PLC0415 - the other commands start without it

    configure(log_level)
    raise typer.Exit(run(NodeOptions(config=config)))


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The configuration.")] = DEFAULT_CONFIG,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Say everything that is wrong with a configuration: file, line, place, hint."""
    checked = check_file(file, os.environ)
    if json:
        print_json({"sound": checked.sound, "problems": checked.problems})
    else:
        typer.echo(checked.text)
    raise typer.Exit(0 if checked.sound else 1)


@app.command()
def envoy(
    file: Annotated[
        Path, typer.Argument(help="Envoy's configuration, as `render envoy` writes it.", exists=True, dir_okay=False, readable=True)
    ] = Path("envoy.yaml"),
    config: Config = DEFAULT_CONFIG,
    concurrency: Annotated[int, typer.Option(help="Envoy's threads; 0: one per core.", min=0, max=1024)] = 0,
    drain_s: Annotated[float, amount("Seconds that requests may go on in an Envoy that has to go.", most=DAY_S)] = 60.0,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="What Envoy logs.")] = "warning",
) -> None:
    """Run this machine's Envoy. SIGHUP: a successor takes over without cutting a request; SIGTERM: drain."""
    from din_extproc.roles.operate.envoy import EnvoyOptions, run  # noqa: PLC0415 - the other commands start without it

    configure("info")
    admin = settings_of(config).envoy.admin
    raise typer.Exit(run(EnvoyOptions(file=file, admin=admin, concurrency=concurrency, drain_s=drain_s, log_level=log_level)))


@app.command()
def drain(
    config: Config = DEFAULT_CONFIG,
    at_least_s: Annotated[
        float, amount("Seconds for which it still takes connections: until load balancers know that it goes.", most=DAY_S)
    ] = 5.0,
    at_most_s: Annotated[float, amount("Seconds after which it ends, whatever is in flight.", most=DAY_S)] = 60.0,
) -> None:
    """Let this machine's Envoy take no more connections, and wait until it has ended what it has."""
    from din_extproc.edge.probe.envoy_admin import EnvoyAdminUnreachable  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.operate.drain import drain as drain_envoy  # noqa: PLC0415

    try:
        left = drain_envoy(settings_of(config).envoy.admin, at_least_s, at_most_s)
    except EnvoyAdminUnreachable as error:
        fail(str(error))
    if left:
        fail(f"{left} requests are still in flight after {at_most_s:g} s")


@app.command()
def doctor(
    config: Config = DEFAULT_CONFIG,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Ask Redis, Envoy and the sidecar how they do, and say what to change."""
    from din_extproc.roles.operate.doctor import examine, lines  # noqa: PLC0415 - the other commands start without it

    findings = examine(settings_of(config))
    if json:
        print_json(findings)
    else:
        typer.echo("\n".join(lines(findings)))
    raise typer.Exit(1 if any(each.verdict == "wrong" for each in findings) else 0)


@app.command()
def explain(
    request: Annotated[
        Path, typer.Argument(metavar="FILE", help="With a request: a JSON body, or {path, headers, body}. `-` reads standard input.")
    ],
    tenant: Annotated[str, typer.Option(help="Who asks.")],
    config: Config = DEFAULT_CONFIG,
    json: Json = False,  # noqa: FBT002 - a flag
    live: Annotated[bool, typer.Option("--live", help="Over the nodes that the running sidecar knows, as busy as they are.")] = False,  # noqa: FBT002
) -> None:
    """Say where a request would go, and why: what was read, each rule, each node."""
    from din_extproc.roles.operate.nodes import SidecarUnreachable, rows  # noqa: PLC0415
    from din_extproc.tools.explain.explain import ExplainFailed  # noqa: PLC0415 - the other commands start without it
    from din_extproc.tools.explain.explain import explain as explain_request  # noqa: PLC0415

    settings = settings_of(config)
    if str(request) != "-" and not request.exists():
        fail(f"{request} is no file; give a file with the request's JSON, or - for standard input")
    try:
        text = sys.stdin.buffer.read() if str(request) == "-" else request.read_bytes()
        explained = explain_request(settings, tenant, text, rows(settings) if live else None)
    except (ExplainFailed, SidecarUnreachable, OSError) as error:
        fail(str(error))
    if json:
        print_json(explained)
    else:
        typer.echo("\n".join(explained.lines()))
    raise typer.Exit(0 if explained.sent else 1)


@audit_app.command("verify")
def audit_verify(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders with logs of one or more replicas. [default: that of the configuration]")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Where the keys, and the folder, stand.", envvar="DIN_CONFIG")
    ] = None,
    key: Annotated[list[str] | None, typer.Option(help="ID=FILE of a key; more than once for more keys.")] = None,
    since: Annotated[int, typer.Option("--from", min=1, help="The first segment to look at; earlier ones may lie elsewhere.")] = 1,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Prove that nothing in the logs was changed, removed or moved; or name what was."""
    from din_extproc.roles.operate.audit import AuditUnreadable, proof  # noqa: PLC0415 - the other commands start without it

    try:
        proved = proof(tuple(folders or ()), config or (None if key else DEFAULT_CONFIG), tuple(key or ()), since, os.environ)
    except AuditUnreadable as error:
        fail(str(error))
    if json:
        print_json(proved)
    else:
        typer.echo(proved.text)
    raise typer.Exit(0 if proved.whole else 1)


@app.command()
def replay(
    folders: Annotated[list[Path], typer.Argument(help="Folders with audit logs of one or more replicas.")],
    config: Config = DEFAULT_CONFIG,
    before: Annotated[
        Path | None, typer.Option(help="The configuration that was in use: both are run. Without it the record is compared with.")
    ] = None,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Decide recorded requests again under another configuration, and say what would be different. Exit code 1: something would."""
    from din_extproc.tools.replay.replay import ReplayRefused  # noqa: PLC0415 - the other commands start without it
    from din_extproc.tools.replay.replay import replay as rerun  # noqa: PLC0415

    after = settings_of(config)
    try:
        replayed = rerun(tuple(folders), after, None if before is None else settings_of(before))
    except ReplayRefused as error:
        fail(str(error))
    if json:
        print_json(replayed)
    else:
        typer.echo("\n".join(replayed.lines()))
    raise typer.Exit(1 if replayed.changes else 0)


@app.command()
def verify(
    url: Annotated[str, typer.Option(help="Envoy, as clients reach it.")],
    key: Annotated[str, typer.Option(envvar="DIN_KEY", help="An API key: its tenant's view of the table is walked.")],
    config: Config = DEFAULT_CONFIG,
    longest: Annotated[int, typer.Option(help="The most prompt tokens to ask with.")] = 20_000,
    live: Annotated[bool, typer.Option("--live", help="Also over nodes that registered, as the sidecar knows them.")] = False,  # noqa: FBT002
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Ask a deployment through every entry of its route table, and say where the answers came from."""
    from din_extproc.roles.operate.nodes import SidecarUnreachable, rows  # noqa: PLC0415 - the other commands start without it
    from din_extproc.tools.verify.verify import VerifyOptions, VerifyRefused  # noqa: PLC0415
    from din_extproc.tools.verify.verify import verify as walk  # noqa: PLC0415

    settings = settings_of(config)
    try:
        verified = walk(settings, VerifyOptions(url, key, longest), rows(settings) if live else ())
    except (VerifyRefused, SidecarUnreachable) as error:
        fail(str(error))
    if json:
        print_json(verified)
    else:
        typer.echo("\n".join(verified.lines()))
    raise typer.Exit(0 if verified.sound else 1)


@app.command()
def nodes(
    config: Config = DEFAULT_CONFIG,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep it up to date until Ctrl-C.")] = False,  # noqa: FBT002
    every_s: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """What the running sidecar knows of its nodes: state, trust, load, and why."""
    from din_extproc.roles.operate import nodes as role  # noqa: PLC0415 - the other commands start without it

    settings = settings_of(config)
    try:
        if json:
            print_json(role.ask(settings))
        elif watch:
            role.watch(settings, every_s)
        else:
            role.show(settings)
    except role.SidecarUnreachable as error:
        fail(str(error))
    except KeyboardInterrupt:
        return


@app.command()
def demo(
    check: Annotated[bool, typer.Option("--check", help="Play a client against it, then stop it.")] = False,  # noqa: FBT002
    port: Annotated[int, port("Envoy's port on loopback; 0 takes a free one.", least=0)] = 0,
    simulated: Annotated[bool, typer.Option("--simulated", help="Engine simulators instead of real models.")] = False,  # noqa: FBT002
) -> None:
    """Envoy, Redis, the sidecar and small real models on this machine; Ctrl-C stops everything."""
    from din_extproc.tools.demo.demo import DemoOptions, run  # noqa: PLC0415 - the other commands start without it

    raise typer.Exit(run(DemoOptions(check=check, port=port, simulated=simulated)))


@app.command("engine-sim")
def engine_sim(
    model: Annotated[str, typer.Option(help="The model's own name.")] = "sim-model",
    served_model: Annotated[list[str] | None, typer.Option(help="A name that requests may use; repeatable.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", callback=not_empty)] = "127.0.0.1",
    port: Annotated[int, port("0 takes a free one.", least=0)] = 0,
    api: Annotated[Literal["vllm", "ollama", "tgi", "triton", "tensorrt_llm"], typer.Option(help="Whose paths and words.")] = "vllm",
    runner: Annotated[Literal["generate", "pooling"], typer.Option(help="A chat model, or one for embeddings and rerank.")] = "generate",
    max_model_len: Annotated[int, typer.Option(help="Tokens, prompt and output together.")] = 8192,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = 64,
    prefill_rate: Annotated[float, amount("Prompt tokens per second.", least=0.001, most=_FASTEST)] = 8000.0,
    decode_rate: Annotated[float, amount("Output tokens per second of one stream alone.", least=0.001, most=_FASTEST)] = 60.0,
    kv_tokens: Annotated[int, typer.Option(help="Tokens that fit into memory.")] = 131072,
    tokenizer: Annotated[str, typer.Option(help="A folder with tokenizer.json instead of the built-in one.")] = "",
    faults: Annotated[
        str,
        typer.Option(help=f"`KIND:name=value,...; KIND...`, such as `reset:after=3,count=2; latency:ms=200`. Kinds: {', '.join(KINDS)}."),
    ] = "",
    seed: Annotated[int, typer.Option(help="Of the draws of faults with a probability.")] = 0,
) -> None:
    """A modelled engine that answers as vLLM (or another one) does under load, with fault switches."""
    from din_extproc.tools.engine_sim.main import EngineSimOptions, run  # noqa: PLC0415 - the other commands start without it

    try:
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
                tokenizer=tokenizer,
                faults=faults,
                seed=seed,
            )
        )
    except (ValueError, OSError) as error:
        fail(str(error))
