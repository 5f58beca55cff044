"""A request without a body whose answer the sidecar is to see: switched on by the sidecar's reply, beside switched on from the start."""

from tests.bench.contenders import wire_noop
from tests.bench.field import Field, Figures
from tests.bench.harness import median

_REQUEST = "GET /v1/models HTTP/1.1\r\nhost: bench\r\n\r\n"


def late_modes(field: Field) -> Figures:
    """CPU of Envoy and server per request, the first ÷ the second in the same round."""
    contenders = [wire_noop(field.exits, field.node_ports, field.folder, late=late) for late in (True, False)]
    rounds = [[field.spend(each, _REQUEST) for each in contenders] for _ in range(field.effort.rounds)]
    return {"late_modes_cpu_ratio": median(sum(late.cpu_us.values()) / sum(early.cpu_us.values()) for late, early in rounds)}
