"""EndpointSlices and pods of Kubernetes, as far as they say where nodes are and what they serve.

Rule: what an object leaves out has the meaning that the API reference gives it; a value that can't be used refuses its endpoints only.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from msgspec import Struct, field

from din_extproc.domain.membership import NodeState
from din_extproc.domain.node import Endpoint
from din_extproc.edge.discovery.source import FoundEndpoint

PREFIX = "din.dev/"


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(name for each in text.split(",") if (name := each.strip()))


_STATED: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "version": ("version", str),
    "dtype": ("dtype", str),
    "compute-capability": ("compute_capability", str),
    "tp-world-size": ("tp_world_size", int),
    "max-seq-len": ("max_seq_len", int),
    "max-concurrency": ("max_concurrency", int),
    "adapters": ("adapters", _read_names),
}
"""Labels and annotations after the prefix, with the fields of `Node` that they state."""


class Metadata(Struct, rename="camel", frozen=True):
    """Of an object, or of a list of them."""

    name: str = ""
    resource_version: str = ""
    continue_: str = field(name="continue", default="")
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None

    def read_stated(self) -> dict[str, Any]:
        """Return the fields of a node that labels and annotations state; an annotation wins over a label.

        Raises:
            ValueError: a number is none.
        """
        given = {**(self.labels or {}), **(self.annotations or {})}
        stated = {}
        for key, (name, read) in _STATED.items():
            text = given.get(PREFIX + key)
            if text is not None:
                try:
                    stated[name] = read(text)
                except ValueError:
                    raise ValueError(f"{PREFIX}{key} is {text[:100]!r}, and a whole number is expected") from None
        return stated


class _Conditions(Struct, frozen=True):
    ready: bool | None = None
    terminating: bool | None = None


class _SliceEndpoint(Struct, frozen=True):
    addresses: tuple[str, ...] = ()
    conditions: _Conditions = _Conditions()

    @property
    def state(self) -> NodeState:
        if self.conditions.terminating:
            return NodeState.DRAINING
        return NodeState.LOADING if self.conditions.ready is False else NodeState.READY


class _Port(Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class EndpointSlice(Struct, rename="camel", frozen=True):
    """A part of the endpoints of a Service (`discovery.k8s.io/v1`)."""

    metadata: Metadata
    endpoints: tuple[_SliceEndpoint, ...] | None = None
    ports: tuple[_Port, ...] | None = None

    @property
    def ports_by_name(self) -> dict[str, int]:
        """The port numbers by name; "" is the name of one without."""
        return {each.name or "": each.port for each in self.ports or () if each.port}

    def list_addresses(self) -> Iterator[tuple[str, NodeState]]:
        """Yield the address and the state of each endpoint. Its further addresses are the same pod's."""
        for each in self.endpoints or ():
            for address in each.addresses[:1]:
                yield address, each.state


class _Condition(Struct, frozen=True):
    type: str
    status: str


class _PodStatus(Struct, frozen=True):
    phase: str = ""
    pod_ip: str = field(name="podIP", default="")
    conditions: tuple[_Condition, ...] | None = None


class _ContainerPort(Struct, rename="camel", frozen=True):
    container_port: int
    name: str = ""


class _Container(Struct, frozen=True):
    ports: tuple[_ContainerPort, ...] | None = None


class _PodSpec(Struct, frozen=True):
    containers: tuple[_Container, ...] = ()


class Pod(Struct, frozen=True):
    """A pod (`v1`)."""

    metadata: Metadata
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()

    @property
    def ports_by_name(self) -> dict[str, int]:
        """The port numbers of its containers by name."""
        return {port.name: port.container_port for container in self.spec.containers for port in container.ports or ()}

    def list_addresses(self) -> Iterator[tuple[str, NodeState]]:
        """Yield its address, if it has one and has not ended, with its state."""
        if not self.status.pod_ip or self.status.phase in {"Succeeded", "Failed"}:
            return
        ready = any(each.type == "Ready" and each.status == "True" for each in self.status.conditions or ())
        state = NodeState.DRAINING if self.metadata.deletion_timestamp else NodeState.READY if ready else NodeState.LOADING
        yield self.status.pod_ip, state


def list_endpoints(found: EndpointSlice | Pod, wanted: int | str) -> Iterator[tuple[Endpoint, FoundEndpoint]]:
    """Yield the endpoints of an object; none if it has no port of the wanted name.

    Args:
        found: The object.
        wanted: A port number, or the name of a port.
    """
    port = wanted if isinstance(wanted, int) else found.ports_by_name.get(wanted)
    if port is None:
        return
    stated: dict[str, Any] = {}
    problem = ""
    try:
        stated = found.metadata.read_stated()
    except ValueError as error:
        problem = str(error)
    for address, state in found.list_addresses():
        with suppress(ValueError):
            address = str(ip_address(address))  # noqa: PLW2901 - in one spelling; what is no address is refused as such
        yield Endpoint(address, port), FoundEndpoint(state=state, stated=stated, problem=problem)
