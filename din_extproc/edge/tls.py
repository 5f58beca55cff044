"""TLS on our ports and toward the registry: certificates from files, read again when the files change.

Rule: a handshake uses what the files hold now; while they hold nothing sound (one is written, the other not yet), what they held before.
"""

import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from msgspec import Struct

_log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""Whoever needs longer for the handshake is cut off."""
_PEM_BEGINS = "-----BEGIN"
Made = TypeVar("Made")


class ServerFiles(Struct, frozen=True):
    """What a port proves itself with."""

    cert: str
    """PEM: the certificate, then those that lead to its root."""
    key: str
    """PEM, without a pass phrase."""
    client_ca: str | None = None
    """PEM: who may have issued the certificates of clients. None: clients need none."""

    @property
    def files(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(file for file in (self.cert, self.key, self.client_ca) if file is not None)


class ClientFiles(Struct, frozen=True):
    """Whom a client believes, and what it proves itself with."""

    ca: str
    """PEM: who may have issued the server's certificate."""
    cert: str | None = None
    """PEM, with `key`. None: the client shows none."""
    key: str | None = None
    server_name: str | None = None
    """The name that the server's certificate must carry. None: the one in its address."""

    @property
    def files(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(file for file in (self.ca, self.cert, self.key) if file is not None)


class TlsAddress(Struct, frozen=True):
    """An address where TLS is spoken."""

    address: str
    files: ServerFiles

    def __str__(self) -> str:
        return f"{self.address} (TLS)"


class CertificateUnusable(Exception):  # noqa: N818 - it says what the files are
    """A file of certificates can't be used; `field` says which one."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ReloadedFiles(Generic[Made]):
    """Something made from files; made anew when one of them has changed.

    Args:
        files: Whose changes count.
        make: Raises `CertificateUnusable` when they can't be used.
    """

    def __init__(self, files: tuple[str, ...], make: Callable[[], Made]) -> None:
        self._files = files
        self._make = make
        self._marks = self._seen()
        self._made = make()

    def now(self) -> Made:
        """It, as the files are now."""
        marks = self._seen()
        if marks != self._marks:
            self._marks = marks
            try:
                self._made = self._make()
                _log.info("%s has changed and is in use", self._files[0])
            except CertificateUnusable as error:
                _log.error("%s has changed and can't be used, the former one stays: %s", self._files[0], error)
        return self._made

    def _seen(self) -> list[tuple[int, int, int] | None]:
        return [_seen(file) for file in self._files]


def server_context(files: ServerFiles, alpn: tuple[str, ...]) -> ssl.SSLContext:
    """For a listening port. Each handshake uses what the files hold then.

    Args:
        files: What the port proves itself with.
        alpn: Protocols that are spoken there.

    Raises:
        Unusable: a file can't be read, is none, or the key is not the certificate's.
    """
    current = ReloadedFiles(files.files, lambda: _server_context(files, alpn))
    context = _server_context(files, alpn)

    def swap(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = current.now()

    context.sni_callback = swap
    return context


def client_context(files: ClientFiles) -> ssl.SSLContext:
    """For connections of ours.

    Raises:
        Unusable: as `server_context` does.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_ca(context, "ca", files.ca)
    if files.cert is not None and files.key is not None:
        _load_pair(context, files.cert, files.key)
    return context


def pinned_context(files: ServerFiles) -> ssl.SSLContext:
    """For asking a port of this very configuration: exactly its certificate is believed, and shown where one is wanted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    _load_ca(context, "cert", files.cert)
    if files.client_ca is not None:
        _load_pair(context, files.cert, files.key)
    return context


def names_of(certificate: Any) -> frozenset[str]:
    """The names that a peer's certificate gives, as `ssl` shows it: its DNS names, the ends of its URIs, its common name."""
    if not certificate:
        return frozenset()
    names = {value for field in certificate.get("subject", ()) for kind, value in field if kind == "commonName"}
    for kind, value in certificate.get("subjectAltName", ()):
        if kind == "DNS":
            names.add(value)
        elif kind == "URI":
            names.add(urlsplit(value).path.rpartition("/")[2])
    return frozenset(names - {""})


def _server_context(files: ServerFiles, alpn: tuple[str, ...]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(list(alpn))
    _load_pair(context, files.cert, files.key)
    if files.client_ca is not None:
        _load_ca(context, "client_ca", files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_pair(context: ssl.SSLContext, cert: str, key: str) -> None:
    for field, file, wanted in (("cert", cert, "CERTIFICATE"), ("key", key, "PRIVATE KEY")):
        _read(field, file, wanted)
    try:
        context.load_cert_chain(cert, key, password="")  # empty: never asked for at the terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CertificateUnusable("key", f"{key} is not the key of {cert}") from error
        raise CertificateUnusable("cert", f"{cert} and {key} can't be used: {error.reason or error}") from error
    except (OSError, ValueError) as error:
        raise CertificateUnusable("key", f"{key}: {error}; a key with a pass phrase can't be used") from error


def _load_ca(context: ssl.SSLContext, field: str, file: str) -> None:
    text = _read(field, file, "CERTIFICATE")
    try:
        context.load_verify_locations(cadata=text[text.index(_PEM_BEGINS) :])
    except (ssl.SSLError, ValueError) as error:
        raise CertificateUnusable(field, f"{file} can't be used: {error}") from error


def _read(field: str, file: str, wanted: str) -> str:
    try:
        text = Path(file).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise CertificateUnusable(field, f"{file}: can't be read: {(error.strerror or str(error)).lower()}") from error
    if not any(line.startswith(_PEM_BEGINS) and wanted in line for line in text.splitlines()):
        raise CertificateUnusable(field, f"{file}: no {wanted.lower()} in PEM form (-----BEGIN ... {wanted}-----)")
    return text


def _seen(file: str) -> tuple[int, int, int] | None:
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
