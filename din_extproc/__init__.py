"""din-extproc: an Envoy ext_proc sidecar that turns scattered GPU nodes into one inference network.

Packages, in the order in which one request passes them:

    wire        decode Envoy's ext_proc messages into events, encode verdicts into replies (sans-IO)
    intent      request head + body -> Intent: model, tokens, stream, version, deadline
    route       Intent -> pool: aliases, versions, ordered rules, one immutable route table
    screen      find and mask sensitive data in prompts
    admit       API keys, budgets, reservations; the port to the rate-limit counters
    schedule    pick a node of the pool: filter -> score -> pick
    health      circuit breakers, ramp-up, probe schedules
    southbound  dialects of the engines: requests, answers, errors, load metrics
      ... the node answers; Envoy streams the answer to the client, Python does not see the tokens ...
    observe     Envoy's access-log entry -> token usage, outcome, metrics, spans
    audit       audit records: chained, signed, verifiable
    measure     timings of answers as a client sees them
    flow        request handlers: the order of these steps
    registry    node table, liveness, trust, catalogue claims
    control     topology -> Envoy configuration (static and xDS)
    edge        adapters for sockets, files, clocks and processes, one folder per kind
    settings    din.yaml -> one frozen tree; reports all errors at once
    roles       composition roots: `serve`, `node`, and the commands that configure and operate a deployment
    tools       explain, replay, simulate, verify, bench, demo, engine-sim: imported by nothing above
    cli         command line: parse, call, print
    client      a Python client for programs that call the network
    domain      frozen value objects that the packages exchange

Imports go down only: cli -> tools -> roles -> settings -> edge -> flow -> {core packages} -> domain -> _proto. Core packages never import
each other. Time, randomness and I/O are arguments; a refusal is a value, an exception is a fault.

Glossary: `deploy/docs/pages/glossary.md`.
"""

__version__ = "0.2.0"
