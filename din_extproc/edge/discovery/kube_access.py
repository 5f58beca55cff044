"""Access to a Kubernetes API server: its address, its authority, and our credentials.

Rule: a token goes into the header of a request and nowhere else. Files are read anew for every connection: all of them are rotated.
"""

import os
import ssl
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import yaml
from msgspec import Struct, field

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class AccessUnavailable(Exception):  # noqa: N818 - it says what the access is
    """There are no usable credentials; the message names the file and the field, never the content."""


class KubeAccess:
    """The address of an API server, and how to connect.

    Args:
        server: The base URL.
        tls: Verifies the server, and has the client certificate if there is one. None: plain HTTP on this machine.
        token: The bearer token; "": none.
        server_name: The name in the server's certificate; None: that of the URL.
    """

    def __init__(self, server: str, tls: ssl.SSLContext | None, token: str = "", server_name: str | None = None) -> None:
        self.server = server
        self.tls = tls
        self.server_name = server_name
        self.headers = {"accept": "application/json", **({"authorization": f"Bearer {token}"} if token else {})}


class _KubeCluster(Struct, rename="kebab", frozen=True):
    server: str
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    tls_server_name: str | None = None
    insecure_skip_tls_verify: bool = False
    proxy_url: str = ""


class _KubeUser(Struct, rename="kebab", frozen=True):
    token: str = ""
    token_file: str = field(name="tokenFile", default="")
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    exec: Any = None
    auth_provider: Any = None
    username: str = ""


class _KubeContext(Struct, frozen=True):
    cluster: str
    user: str = ""


class _NamedCluster(Struct, frozen=True):
    name: str
    cluster: _KubeCluster


class _NamedUser(Struct, frozen=True):
    name: str
    user: _KubeUser


class _NamedContext(Struct, frozen=True):
    name: str
    context: _KubeContext


class _KubeConfig(Struct, rename="kebab", frozen=True):
    clusters: list[_NamedCluster]
    contexts: list[_NamedContext]
    users: list[_NamedUser] = []
    current_context: str = ""


def load_access(kubeconfig: str, context: str, env: Mapping[str, str]) -> KubeAccess:
    """Read the access of a kubeconfig file, or that of this pod's service account.

    Args:
        kubeconfig: The file; "": the service account.
        context: The context of the kubeconfig; "": its current one.
        env: The environment variables.

    Raises:
        AccessUnavailable: a file or a variable is missing, malformed, or asks for what is not supported.
    """
    try:
        return _read_kubeconfig(Path(kubeconfig), context) if kubeconfig else _read_service_account(env)
    except (OSError, UnicodeDecodeError) as error:  # an ssl.SSLError is an OSError
        where = getattr(error, "filename", None) or kubeconfig or SERVICE_ACCOUNT
        raise AccessUnavailable(f"{where} can't be used: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None


def _read_service_account(env: Mapping[str, str]) -> KubeAccess:
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise AccessUnavailable("KUBERNETES_SERVICE_HOST is not set: this is no pod of a cluster, and `kubeconfig` is not given")
    tls = ssl.create_default_context(cafile=str(SERVICE_ACCOUNT / "ca.crt"))
    return KubeAccess(f"https://{f'[{host}]' if ':' in host else host}:{port}", tls, _read_token(SERVICE_ACCOUNT / "token"))


def _read_kubeconfig(file: Path, name: str) -> KubeAccess:
    try:
        config = msgspec.convert(yaml.safe_load(file.read_text(encoding="utf-8")), _KubeConfig)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        reason = str(error) if isinstance(error, msgspec.ValidationError) else "it is no YAML"  # YAML's messages quote the file
        raise AccessUnavailable(f"{file}: {reason}") from None
    chosen = name or config.current_context
    context = next((each.context for each in config.contexts if each.name == chosen), None)
    if context is None:
        raise AccessUnavailable(f"{file} has no context {chosen!r}")
    cluster = next((each.cluster for each in config.clusters if each.name == context.cluster), None)
    if cluster is None:
        raise AccessUnavailable(f"{file} has no cluster {context.cluster!r}")
    user = next((each.user for each in config.users if each.name == context.user), _KubeUser())
    unsupported = {
        "exec": user.exec,
        "auth-provider": user.auth_provider,
        "username": user.username,
        "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
        "proxy-url": cluster.proxy_url,
    }
    for field_name, value in unsupported.items():
        if value:
            raise AccessUnavailable(f"{file}: `{field_name}` is not supported; use a token or a client certificate, and an authority")
    token = user.token or (_read_token(file.parent / user.token_file) if user.token_file else "")
    server = urlsplit(cluster.server)
    if server.scheme == "https":
        return KubeAccess(cluster.server.rstrip("/"), _make_tls(file, cluster, user), token, cluster.tls_server_name)
    if server.scheme != "http" or (token and not _is_loopback(server.hostname or "")):
        raise AccessUnavailable(f"{file}: server {cluster.server!r} is not https://, and its token would be readable on the network")
    return KubeAccess(cluster.server.rstrip("/"), None, token)


def _make_tls(file: Path, cluster: _KubeCluster, user: _KubeUser) -> ssl.SSLContext:
    authority = _read_pem(file, "certificate-authority", cluster.certificate_authority, cluster.certificate_authority_data)
    try:
        tls = ssl.create_default_context(cadata=authority.decode() if authority else None)
        certificate = _read_pem(file, "client-certificate", user.client_certificate, user.client_certificate_data)
        if certificate:
            with _as_file(certificate + b"\n" + _read_pem(file, "client-key", user.client_key, user.client_key_data)) as path:
                tls.load_cert_chain(path)
    except ssl.SSLError as error:
        raise AccessUnavailable(f"{file}: the certificates can't be used: {error.reason or 'no PEM'}") from None
    return tls


def _read_pem(file: Path, name: str, path: str, data: str) -> bytes:
    """Return what a kubeconfig has as data, or names as a file relative to itself; b"": neither."""
    try:
        return b64decode(data, validate=True) if data else (file.parent / path).read_bytes() if path else b""
    except ValueError:
        raise AccessUnavailable(f"{file}: `{name}-data` is not base64") from None


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Give a path to a content that never gets to a disk: `ssl` takes certificates as files only."""
    descriptor = os.memfd_create("certificate")
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _read_token(file: Path) -> str:
    token = file.read_text(encoding="utf-8").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise AccessUnavailable(f"{file} is empty, or no token")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
