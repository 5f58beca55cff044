"""TLS of listeners and registry clients: certificates from files, reloaded when the files change.

Invariant: a handshake uses the current content of the files, or the last valid content while they are incomplete.
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
"""Maximum duration of a handshake."""
_PEM_BEGINS = "-----BEGIN"
Made = TypeVar("Made")


class ServerFiles(Struct, frozen=True):
    """Certificate files of a listener."""

    cert: str
    """PEM: the certificate and its chain."""
    key: str
    """PEM: the private key without a passphrase."""
    client_ca: str | None = None
    """PEM: CAs of client certificates. None: no client certificate is required."""

    @property
    def files(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(file for file in (self.cert, self.key, self.client_ca) if file is not None)


class ClientFiles(Struct, frozen=True):
    """Certificate files of a client."""

    ca: str
    """PEM: CAs of the server's certificate."""
    cert: str | None = None
    """PEM: the client certificate, with `key`. None: no client certificate."""
    key: str | None = None
    server_name: str | None = None
    """Name that the server's certificate must contain. None: the host of its address."""

    @property
    def files(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(file for file in (self.ca, self.cert, self.key) if file is not None)


class TlsAddress(Struct, frozen=True):
    """Address of a TLS listener."""

    address: str
    files: ServerFiles

    def __str__(self) -> str:
        return f"{self.address} (TLS)"


class CertificateUnusable(Exception):  # noqa: N818 - it says what the files are
    """A certificate file is unusable; `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ReloadedFiles(Generic[Made]):
    """Object built from files; rebuilt when one of them changes.

    Args:
        files: Files to check for changes.
        make: Builds the object; raises `CertificateUnusable` if the files are unusable.
    """

    def __init__(self, files: tuple[str, ...], make: Callable[[], Made]) -> None:
        self._files = files
        self._make = make
        self._marks = self._get_mark()
        self._made = make()

    def now(self) -> Made:
        """Return the object for the current files."""
        marks = self._get_mark()
        if marks != self._marks:
            self._marks = marks
            try:
                self._made = self._make()
                _log.info("%s has changed and is in use", self._files[0])
            except CertificateUnusable as error:
                _log.error("%s has changed and can't be used, the previous certificate stays in use: %s", self._files[0], error)
        return self._made

    def _get_mark(self) -> list[tuple[int, int, int] | None]:
        return [_get_mark(file) for file in self._files]


def server_context(files: ServerFiles, alpn: tuple[str, ...]) -> ssl.SSLContext:
    """Create the context of a listener. Each handshake uses the current files.

    Args:
        files: Certificate files.
        alpn: Supported protocols.

    Raises:
        CertificateUnusable: A file is unreadable or malformed, or key and certificate do not match.
    """
    current = ReloadedFiles(files.files, lambda: _make_server_context(files, alpn))
    context = _make_server_context(files, alpn)

    def swap(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = current.now()

    context.sni_callback = swap
    return context


def client_context(files: ClientFiles) -> ssl.SSLContext:
    """Create the context of a client.

    Raises:
        CertificateUnusable: As in `server_context`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_ca(context, "ca", files.ca)
    if files.cert is not None and files.key is not None:
        _load_pair(context, files.cert, files.key)
    return context


def pinned_context(files: ServerFiles) -> ssl.SSLContext:
    """Create a client context for a listener of this configuration, which trusts and presents exactly its certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    _load_ca(context, "cert", files.cert)
    if files.client_ca is not None:
        _load_pair(context, files.cert, files.key)
    return context


def names_of(certificate: Any) -> frozenset[str]:
    """Return the names in a peer's certificate: DNS names, last parts of URIs, common name."""
    if not certificate:
        return frozenset()
    names = {value for field in certificate.get("subject", ()) for kind, value in field if kind == "commonName"}
    for kind, value in certificate.get("subjectAltName", ()):
        if kind == "DNS":
            names.add(value)
        elif kind == "URI":
            names.add(urlsplit(value).path.rpartition("/")[2])
    return frozenset(names - {""})


def _make_server_context(files: ServerFiles, alpn: tuple[str, ...]) -> ssl.SSLContext:
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
        _check_readable(field, file, wanted)
    try:
        context.load_cert_chain(cert, key, password="")  # empty: OpenSSL must not prompt at the terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CertificateUnusable("key", f"{key} is not the key of {cert}") from error
        raise CertificateUnusable("cert", f"{cert} and {key} can't be used: {error.reason or error}") from error
    except (OSError, ValueError) as error:
        raise CertificateUnusable("key", f"{key}: {error}; a key with a pass phrase can't be used") from error


def _load_ca(context: ssl.SSLContext, field: str, file: str) -> None:
    text = _check_readable(field, file, "CERTIFICATE")
    try:
        context.load_verify_locations(cadata=text[text.index(_PEM_BEGINS) :])
    except (ssl.SSLError, ValueError) as error:
        raise CertificateUnusable(field, f"{file} can't be used: {error}") from error


def _check_readable(field: str, file: str, wanted: str) -> str:
    try:
        text = Path(file).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise CertificateUnusable(field, f"{file}: can't be read: {(error.strerror or str(error)).lower()}") from error
    if not any(line.startswith(_PEM_BEGINS) and wanted in line for line in text.splitlines()):
        raise CertificateUnusable(field, f"{file}: no {wanted.lower()} in PEM form (-----BEGIN ... {wanted}-----)")
    return text


def _get_mark(file: str) -> tuple[int, int, int] | None:
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
