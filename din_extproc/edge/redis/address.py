"""Parser of Redis URLs (`redis://`, `rediss://`, `unix://`) with the syntax of redis-py.

Invariant: a URL is parsed once, at start; an error names the URL without its password.
"""

import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct, structs
from redis.asyncio.connection import SSLConnection, parse_url

_CERTIFICATE_CHECKS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_CONNECTION_OPTIONS = frozenset({"host", "port", "path", "db", "username", "password", "connection_class"})
_TLS_OPTIONS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"})


class Address(Struct, frozen=True):
    """Address and connection options of one Redis server."""

    host: str
    port: int
    path: str = ""
    """Path of a Unix socket; replaces host and port."""
    db: int = 0
    username: str = ""
    password: str = ""
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        """Return the address for logs, without the password."""
        return self.path or f"{self.host}:{self.port}"

    def with_host(self, host: str, port: int) -> "Address":
        """Return the same connection options for another server."""
        return structs.replace(self, host=host, port=port, path="")


def parse_redis_url(url: str) -> Address:
    """Parse a Redis URL.

    Raises:
        ValueError: The text is no Redis URL, or an option is unknown.
    """
    parts = urlsplit(url)
    redacted = parts._replace(netloc="...", query="").geturl()
    if parts.scheme != "unix" and parts.path.strip("/") and not parts.path.strip("/").isdigit():
        raise ValueError(f"{redacted}: the path is the number of a database")
    try:
        options = parse_url(url)
    except ValueError as error:
        raise ValueError(f"{redacted}: {error}") from None
    unknown = options.keys() - _CONNECTION_OPTIONS - _TLS_OPTIONS
    if unknown:
        raise ValueError(f"{redacted}: unknown option {', '.join(sorted(unknown))}")
    secure = issubclass(options.get("connection_class", object), SSLConnection)
    return Address(
        host=options.get("host", "localhost"),
        port=options.get("port", 6379),
        path=options.get("path", ""),
        db=int(options.get("db", 0)),
        username=options.get("username") or "",
        password=options.get("password") or "",
        tls=_make_tls(options) if secure else None,
    )


def _make_tls(options: Mapping[str, Any]) -> ssl.SSLContext:
    check = options.get("ssl_cert_reqs", "required")
    if check not in _CERTIFICATE_CHECKS:
        raise ValueError(f"ssl_cert_reqs is one of {', '.join(_CERTIFICATE_CHECKS)}")
    authority, certificate, key = (options.get(f"ssl_{name}") for name in ("ca_certs", "certfile", "keyfile"))
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise ValueError(f"ssl_ca_certs={authority} can't be used: {error.strerror or error}") from error
    context.check_hostname = check == "required" and str(options.get("ssl_check_hostname", "true")).lower() != "false"
    context.verify_mode = _CERTIFICATE_CHECKS[check]
    if certificate:
        try:
            context.load_cert_chain(certificate, key, password="")  # empty: OpenSSL must not prompt at the terminal
        except OSError as error:
            raise ValueError(f"ssl_certfile={certificate} and ssl_keyfile={key} can't be used: {error.strerror or error}") from error
    return context
