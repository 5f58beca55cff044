"""Certificates as operators have them: PEM files of a private authority, made for each test."""

import ssl
from pathlib import Path

import trustme


class Authority:
    """A private authority that writes into a folder.

    Args:
        folder: The folder of all files.
        name: The name of its own file: two authorities can share a folder.
    """

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.file = folder / f"{name}.pem"
        self.authority.cert_pem.write_to_path(self.file)

    def issue(self, file: str, *names: str, common_name: str | None = None) -> dict[str, str]:
        """Write `file.pem` and `file.key`. Return them in the form of a `tls` section."""
        made = self.authority.issue_cert(*names, common_name=common_name)
        cert, key = self.folder / f"{file}.pem", self.folder / f"{file}.key"
        cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        key.write_bytes(made.private_key_pem.bytes())
        return {"cert": str(cert), "key": str(key)}

    def client(self, shown: dict[str, str] | None = None) -> ssl.SSLContext:
        """Return the TLS context of a client that trusts this authority and has this certificate."""
        context = ssl.create_default_context(cafile=str(self.file))
        if shown is not None:
            context.load_cert_chain(shown["cert"], shown["key"])
        return context
