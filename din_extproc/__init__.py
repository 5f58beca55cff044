"""din-extproc: an Envoy ext_proc sidecar that turns scattered GPU nodes into one inference network.

One request, read along the folders:

    wire       Envoy's ext_proc messages become events; verdicts become replies        (no sockets)
    intent     head + body -> Intent: model, tokens, stream, version, patience
    route      Intent -> pool: aliases, versions, ordered rules, one immutable table
    screen     sensitive data in prompts: found, masked
    admit      may the tenant spend this now? keys, budgets, the port to the counters
    schedule   which node of the pool: filter -> score -> pick
    health     who is left out, and who gets a part: breakers, ramps
    southbound what each engine calls things, its load among them
      ... the node answers; Envoy streams it to the client, Python does not see the tokens ...
    observe    Envoy's access-log entry -> what it cost and how it ended
    audit      what is recorded for good, chained and signed, and how a reader proves it whole
    measure    what requests took, seen from outside: two ways of asking compared, one request taken apart
    flow       the conductors: the only place where the order of all this is written
    registry   nodes, liveness, trust, catalogue
    control    topology -> Envoy's own configuration
    edge       everything that touches a socket, a file or a clock, in folders by what is touched (Redis, gRPC, processes, ...)
    settings   din.yaml -> one frozen tree, all errors at once
    sim        the modelled engine behind `engine-sim`
    simulate   the whole network in virtual time: modelled nodes and clients around the product's own decisions
    roles      composition roots: gateway, node, demo, and the commands that look at them; only these construct things
    cli        the command line: parse, call a role, print
    client     apart from all of these: for programs that ask the network, over OpenAI's own client
    domain     the frozen nouns that they all hand to each other

Imports go down only: cli -> roles -> settings -> {edge, simulate} -> flow -> {rooms} -> domain -> _proto. Rooms never import each other.
Time, randomness and I/O enter as arguments; a refusal is a value, an exception is a fault.
"""

__version__ = "0.1.0"
