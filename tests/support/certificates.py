"""Certificates as operators have them: PEM files of a private authority, made for each test."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key


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

    def issue_workload(self, file: str, uri: str) -> dict[str, str]:
        """Write a certificate as SPIFFE has it: its only name is a URI."""
        key, now = generate_private_key(SECP256R1()), datetime.now(UTC)
        issuer = x509.load_pem_x509_certificate(self.authority.cert_pem.bytes())
        signer = load_pem_private_key(self.authority.private_key_pem.bytes(), None)
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
        made = x509.CertificateBuilder(
            issuer_name=issuer.subject,
            subject_name=x509.Name([]),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - timedelta(hours=1),
            not_valid_after=now + timedelta(hours=1),
            extensions=[x509.Extension(x509.SubjectAlternativeName.oid, critical=True, value=names)],
        ).sign(signer, SHA256())
        at = {"cert": self.folder / f"{file}.pem", "key": self.folder / f"{file}.key"}
        at["cert"].write_bytes(made.public_bytes(Encoding.PEM))
        at["key"].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return {name: str(path) for name, path in at.items()}

    def client(self, pair: dict[str, str] | None = None) -> ssl.SSLContext:
        """Return the TLS context of a client that trusts this authority and has this certificate."""
        context = ssl.create_default_context(cafile=str(self.file))
        if pair is not None:
            context.load_cert_chain(pair["cert"], pair["key"])
        return context
