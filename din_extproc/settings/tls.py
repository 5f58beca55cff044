"""`tls:` of a port, and of its clients: the same two sections wherever there is a port.

Rule: files that can't be used are found here, before anything starts. What Envoy reads may lie on Envoy's machine only: that is a warning.
"""

from collections.abc import Mapping
from pathlib import Path

from pydantic import model_validator

from din_extproc.control.topology import ListenerTls, TlsTrust
from din_extproc.edge.tls import CertificateUnusable, ClientFiles, ServerFiles, TlsAddress, client_context, server_context
from din_extproc.settings.document import Document
from din_extproc.settings.problems import Place
from din_extproc.settings.section import Section, Text


class ServerTlsSection(Section):
    """`tls:` of a port. Paths are relative to the configuration."""

    cert: Text
    """PEM: the certificate and those that lead to its root."""
    key: Text
    """PEM, without a pass phrase."""
    client_ca: Text | None = None
    """PEM: whose certificates clients must show. None: they need none."""

    def files(self, folder: Path) -> ServerFiles:
        """As they are reached from here."""
        return ServerFiles(
            str(folder / self.cert), str(folder / self.key), None if self.client_ca is None else str(folder / self.client_ca)
        )


class ClientTlsSection(Section):
    """`tls:` of a client."""

    ca: Text
    """PEM: who issues the server's certificate."""
    cert: Text | None = None
    """PEM, with `key`: what the client shows."""
    key: Text | None = None
    server_name: Text | None = None
    """The name that the server's certificate must carry."""

    @model_validator(mode="after")
    def _check_pair(self) -> "ClientTlsSection":
        if (self.cert is None) != (self.key is None):
            raise ValueError("`cert` and `key`, or neither")
        return self

    def files(self, folder: Path) -> ClientFiles:
        """As they are reached from here."""
        cert, key = (None if file is None else str(folder / file) for file in (self.cert, self.key))
        return ClientFiles(str(folder / self.ca), cert, key, self.server_name)


class EnvoyTlsSection(ClientTlsSection):
    """How Envoy connects to the sidecar's ports that have a `tls`. Envoy reads the files when it starts."""

    def trust(self, folder: Path) -> TlsTrust:
        """For the renderer."""
        found = self.files(folder.absolute())
        return TlsTrust(ca=found.ca, cert=found.cert, key=found.key, server_name=found.server_name)


class ListenerTlsSection(ServerTlsSection):
    """TLS between clients and Envoy. Envoy reads the files when it starts."""

    require_client_certificate: bool = False
    """True: a client without a certificate of `client_ca` can't connect. False: it needs another identity."""

    @model_validator(mode="after")
    def _checkable(self) -> "ListenerTlsSection":
        if self.require_client_certificate and self.client_ca is None:
            raise ValueError("`require_client_certificate` needs `client_ca`, the CA of clients' certificates")
        return self

    def listener_tls(self, folder: Path) -> ListenerTls:
        """For the renderer."""
        found = self.files(folder.absolute())
        return ListenerTls(cert=found.cert, key=found.key, client_ca=found.client_ca, requires_certificate=self.require_client_certificate)


def secured(address: str, tls: ServerTlsSection | None, folder: Path) -> str | TlsAddress:
    """An address to listen on, with what is spoken there."""
    return address if tls is None else TlsAddress(address, tls.files(folder))


def report_files(section: Section, document: Document, folder: Path, place: Place = ()) -> None:
    """Report the files of every `tls` inside the section that can't be used."""
    for name in type(section).model_fields:
        value, inner = getattr(section, name), (*place, name)
        if isinstance(value, ServerTlsSection | ClientTlsSection):
            try:
                if isinstance(value, ServerTlsSection):
                    server_context(value.files(folder), ())
                else:
                    client_context(value.files(folder))
            except CertificateUnusable as error:
                document.report((*inner, error.field), str(error), warning=isinstance(value, EnvoyTlsSection | ListenerTlsSection))
        elif isinstance(value, Section):
            report_files(value, document, folder, inner)


def report_unmatched(ports: Mapping[str, ServerTlsSection | None], envoy: EnvoyTlsSection | None, document: Document, place: Place) -> None:
    """Report ports that Envoy could not talk to.

    Args:
        ports: What Envoy connects to, by the place in the file.
        envoy: How it does.
        document: Where it is reported.
        place: Where that is written.
    """
    for name, tls in ports.items():
        if tls is not None and envoy is None:
            document.report(
                place, f"{name} speaks TLS, but how Envoy connects to it is not said", "give `ca`, the issuer of its certificate"
            )
            return
        if tls is not None and tls.client_ca is not None and envoy is not None and envoy.cert is None:
            document.report(place, f"{name} wants certificates of its clients, and Envoy has none", "give `cert` and `key`")
            return
