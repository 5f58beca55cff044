"""`discover:` of a pool: where its further nodes are found.

Rule: a name is checked for what DNS and Kubernetes allow; whether it exists is for the source to find out.
"""

import re
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from din_extproc.settings.catalog import VersionText
from din_extproc.settings.section import Name, NodeAddress, Positive, Section, Text

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?").fullmatch
_PORT_NAME = re.compile(r"(?=[0-9-]*[a-z])[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?").fullmatch
_LONGEST_NAME = 253
_LAST_PORT = 65535


def _read_dns(text: object) -> object:
    """`name:port`, or the name of SRV records, such as `_http._tcp.vllm.inference.svc.cluster.local`."""
    if not isinstance(text, str):
        raise ValueError("a DNS name is text: `name:port`")  # noqa: TRY004 - a problem of the file, as all validators report it
    name, colon, port = text.rpartition(":")
    services = text.startswith("_")
    if services == bool(colon):
        raise ValueError(f"{text!r} is not `name:port`, or the name of SRV records without a port, such as `_http._tcp.vllm.local`")
    if colon and not (port.isascii() and port.isdigit() and 0 < int(port) <= _LAST_PORT):
        raise ValueError(f"{text!r}: a port is a number from 1 to 65535")
    host = name if colon else text
    labels = host.removesuffix(".").split(".")
    if len(host) > _LONGEST_NAME or not all(_LABEL(label) for label in labels):
        raise ValueError(f"{text!r}: {host!r} is not a DNS name (labels of 1-63 letters, digits, '-' and '_')")
    if labels[-1].isdigit():
        raise ValueError(f"{text!r}: {host!r} is an address, not a name: list it under `nodes`")
    return text


def _read_port(port: object) -> object:
    """A port number, or the name of a port."""
    named = isinstance(port, str) and _PORT_NAME(port) is not None
    if not named and not (type(port) is int and 0 < port <= _LAST_PORT):
        raise ValueError(f"{port!r} is neither a number from 1 to 65535 nor a port's name (at most 15 of a-z, 0-9 and '-')")
    return port


KubernetesName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class KubernetesSection(Section):
    """Endpoints of a Service, or pods with certain labels, in a Kubernetes cluster. They are watched: there is no interval."""

    namespace: KubernetesName
    service: KubernetesName | None = None
    """The Service whose EndpointSlices are watched."""
    selector: Annotated[str, Field(pattern=r"^[A-Za-z0-9./_=!,() -]{1,1000}$")] | None = None
    """Instead of `service`: the label selector of pods, such as `app=vllm,tier!=test`."""
    port: Annotated[int | str, BeforeValidator(_read_port)]
    """The engines' port: a number, or the name of a port of the Service or, with `selector`, of a container."""
    kubeconfig: Text | None = None
    """A kubeconfig file, relative to the configuration; None: the service account of the sidecar's pod."""
    context: Text | None = None
    """With `kubeconfig`: the context; None: the current one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.service is None) == (self.selector is None):
            raise ValueError("give either `service` or `selector`")
        if self.context is not None and self.kubeconfig is None:
            raise ValueError("`context` is one of a `kubeconfig`, which is not given")
        return self


class DiscoverSection(Section):
    """Nodes that are found by DNS or in Kubernetes. What is left out of their properties comes from the model's catalogue entry."""

    dns: Annotated[Text, BeforeValidator(_read_dns)] | None = None
    """`name:port`: each A and AAAA record is a node. A name that begins with `_` has SRV records, which give port, priority and weight."""
    every_s: Annotated[float, Field(strict=False, ge=0.1, le=3600)] = 1.0
    """With `dns`: seconds between two questions. A record with a longer TTL is not asked for before it expires."""
    server: NodeAddress | None = None
    """With `dns`: the DNS server; None: those of the system."""
    kubernetes: KubernetesSection | None = None
    """Instead of `dns`: a Service or pods. Their labels and annotations `din.dev/...` take precedence over what is given here."""
    version: VersionText | None = None
    dtype: Name | None = None
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")] | None = None
    tp_world_size: Positive | None = None
    max_seq_len: Positive | None = None
    max_concurrency: Positive = 64
    """Of a node with the highest weight; those with a lower one take proportionally less."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.dns is None) == (self.kubernetes is None):
            raise ValueError("give either `dns` or `kubernetes`")
        if self.dns is None and self.model_fields_set & {"every_s", "server"}:
            raise ValueError("`every_s` and `server` are for `dns`: Kubernetes reports changes by itself")
        return self
