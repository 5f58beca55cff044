"""Nodes that are remote APIs: where they are, and where their credentials come from.

Rule: the file holds no secret. The configuration names an environment variable or a file, and only Envoy is handed the content.
"""

import re
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

from msgspec import Struct
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from din_extproc.control.topology import SocketAddress
from din_extproc.domain.node import CredentialSource, RemoteApi
from din_extproc.settings.section import Section, Text

REMOTE_ENGINES: Mapping[str, tuple[str, str]] = {
    "openai": ("authorization", "Bearer "),
    "azure_openai": ("api-key", ""),
    "anthropic": ("x-api-key", ""),
}
"""The header of each engine's credential, and what precedes the credential in it."""
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?").fullmatch
_PATH = re.compile(r"(?:/[A-Za-z0-9._~-]+)*").fullmatch
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}").fullmatch
_OURS = re.compile(r"(?:authorization|proxy-authorization|api-key|x-api-key|cookie|host|content-.*|transfer-encoding|x-din-.*|x-envoy-.*)")
_PORTS = {"https": 443, "http": 80}
_ANTHROPIC_VERSION = ("anthropic-version", "2023-06-01")
"""Mandatory; the version whose format is translated."""


class ApiLocation(Struct, frozen=True):
    """A base URL in parts."""

    tls: bool
    host: str
    port: int
    base_path: str


def _read_location(value: Any) -> Any:
    if isinstance(value, ApiLocation):
        return value
    example = "`https://host[:port][/prefix]` is expected, such as https://api.openai.com/v1"
    if not isinstance(value, str):
        raise ValueError(example)  # noqa: TRY004 - pydantic turns it into a finding
    try:
        parts = urlsplit(value)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ValueError(example) from error
    if "@" in parts.netloc:
        raise ValueError("a URL holds no credential; name its environment variable or file in `credential`")
    path = parts.path.rstrip("/")
    if parts.scheme not in _PORTS or not is_host(host) or _PATH(path) is None or parts.query or parts.fragment:
        raise ValueError(example)
    found = ApiLocation(parts.scheme == "https", host, port or _PORTS[parts.scheme], path)
    if not found.tls and not SocketAddress(found.host, found.port).is_loopback:
        raise ValueError(f"{value!r} would send prompts and the credential in clear text; only a host on loopback may be http://")
    return found


def is_host(text: str) -> bool:
    """Return whether the text is a DNS name or an IP address."""
    try:
        ip_address(text)
    except ValueError:
        return _HOST(text) is not None
    return True


def _check_header(name: str) -> str:
    if _HEADER(name) is None:
        raise ValueError(f"{name!r} is not a header's name")
    if _OURS.fullmatch(name.lower()):
        raise ValueError(f"{name!r} is set by the gateway; a credential belongs into `credential`, as {{env: NAME}} or {{file: PATH}}")
    return name


ApiUrl = Annotated[ApiLocation, BeforeValidator(_read_location)]
HeaderName = Annotated[str, AfterValidator(_check_header)]


class CredentialSection(Section):
    """Where the key of a remote API is: one of both."""

    env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")] | None = None
    """The name of an environment variable of the sidecar."""
    file: Text | None = None
    """A file that holds nothing else, relative to the configuration; a new content is in use within seconds."""

    @model_validator(mode="after")
    def _check_one_given(self) -> "CredentialSection":
        if (self.env is None) == (self.file is None):
            raise ValueError("either `env` or `file`")
        return self


class RemoteNode(Protocol):
    """The fields of a pool's node that describe a remote API."""

    @property
    def url(self) -> ApiLocation | None: ...  # noqa: D102
    @property
    def credential(self) -> CredentialSection | None: ...  # noqa: D102
    @property
    def ca(self) -> str: ...  # noqa: D102
    @property
    def headers(self) -> Mapping[str, str]: ...  # noqa: D102
    @property
    def api_version(self) -> str | None: ...  # noqa: D102


def make_remote(engine: str, node: RemoteNode, folder: Path) -> RemoteApi | None:
    """Return the API that a node with a `url` stands for. `folder`: what its files are relative to."""
    if node.url is None:
        return None
    at, credential, headers, base_path = node.url, node.credential, tuple(node.headers.items()), node.url.base_path
    if engine == "anthropic":  # its SDKs add the version's path and header themselves
        base_path = base_path if base_path.endswith("/v1") else f"{base_path}/v1"
        headers = (_ANTHROPIC_VERSION, *headers)
    return RemoteApi(
        host=at.host,
        port=at.port,
        base_path=base_path,
        tls=at.tls,
        ca=str(folder.absolute() / node.ca),
        credential_header=REMOTE_ENGINES[engine],
        credential=None
        if credential is None
        else CredentialSource(credential.env, credential.file and str(folder.absolute() / credential.file)),
        query="" if node.api_version is None else f"api-version={node.api_version}",
        headers=headers,
    )
