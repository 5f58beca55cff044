"""Certificates from files: what can't be used, whose names they carry, and that a handshake uses what the files hold then."""

import asyncio
import ssl

import pytest
from cryptography.hazmat.primitives import serialization

from din_extproc.edge import tls
from din_extproc.edge.grpc.h2_server import H2Server
from tests.support.certificates import Authority


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def server_files(issued, client_ca=None):
    return tls.ServerFiles(issued["cert"], issued["key"], client_ca)


def unusable(**fields):
    with pytest.raises(tls.CertificateUnusable) as raised:
        tls.server_context(tls.ServerFiles(**fields), ())
    return raised.value.field, str(raised.value)


def test_what_can_not_be_used_is_reported_of_the_file_that_it_is(authority, tmp_path):
    one, other = authority.issue("one", "a.test"), authority.issue("other", "b.test")
    (tmp_path / "prose").write_text("no certificate")
    assert unusable(cert=str(tmp_path / "gone"), key=one["key"]) == ("cert", f"{tmp_path}/gone: can't be read: no such file or directory")
    assert unusable(cert=str(tmp_path / "prose"), key=one["key"])[0] == "cert"
    assert unusable(cert=one["cert"], key=one["cert"]) == (
        "key",
        f"{one['cert']}: no private key in PEM form (-----BEGIN ... PRIVATE KEY-----)",
    )
    assert unusable(cert=one["cert"], key=other["key"]) == ("key", f"{other['key']} is not the key of {one['cert']}")
    assert unusable(**one, client_ca=str(tmp_path / "prose"))[0] == "client_ca"


def test_a_key_with_a_pass_phrase_is_refused_and_never_asked_for(authority, tmp_path):
    one = authority.issue("one", "a.test")
    key = serialization.load_pem_private_key((tmp_path / "one.key").read_bytes(), None)
    kind = serialization.BestAvailableEncryption(b"secret")
    (tmp_path / "one.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, kind))
    field, message = unusable(**one)
    assert field in {"cert", "key"}
    assert "one.key" in message


def test_names_of_a_certificate_are_its_common_name_its_dns_names_and_the_ends_of_its_uris():
    certificate = {
        "subject": ((("organizationName", "x"),), (("commonName", "gpu-1"),)),
        "subjectAltName": (("DNS", "gpu-2"), ("URI", "spiffe://example.org/nodes/gpu-3"), ("IP Address", "10.0.0.1")),
    }
    assert tls.names_of(certificate) == {"gpu-1", "gpu-2", "gpu-3"}
    assert tls.names_of(None) == frozenset()


async def handshake(port, context, server_name="a.test"):
    """The certificate that the port shows, and the protocol."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=server_name)
    connection = writer.get_extra_info("ssl_object")
    certificate = connection.getpeercert()["serialNumber"], connection.selected_alpn_protocol()
    writer.close()
    return certificate


async def test_a_handshake_uses_what_the_files_hold_now_and_what_they_held_while_they_hold_nothing_sound(authority, tmp_path):
    issued = authority.issue("one", "a.test")
    server = H2Server((), max_body_bytes=1024)
    [port] = await server.start(tls.TlsAddress("127.0.0.1:0", server_files(issued)))
    context = authority.client()
    context.set_alpn_protocols(["h2"])
    try:
        first, protocol = await handshake(port, context)
        assert protocol == "h2"
        (tmp_path / "one.pem").write_text("half written")
        assert (await handshake(port, context))[0] == first
        authority.issue("one", "a.test")
        second, protocol = await handshake(port, context)
        assert second != first
        assert protocol == "h2"
    finally:
        await server.stop(1)


async def test_another_authority_of_clients_is_heeded_from_the_next_handshake_on(authority, tmp_path):
    issued, old = authority.issue("one", "a.test"), Authority(tmp_path, "old")
    certificate = old.issue("client", "gpu-1")
    server = H2Server((), max_body_bytes=1024)
    [port] = await server.start(tls.TlsAddress("127.0.0.1:0", server_files(issued, str(old.file))))

    async def welcome(context):
        """Whether the port goes on after the handshake: with TLS 1.3 the client's certificate is judged after it."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="a.test")
            try:
                return bool(await reader.read(9))
            finally:
                writer.close()
        except (ssl.SSLError, ConnectionError):
            return False

    try:
        assert await welcome(authority.client(certificate))
        assert not await welcome(authority.client())
        Authority(tmp_path, "old")  # the same file, another authority
        assert not await welcome(authority.client(certificate))
    finally:
        await server.stop(1)


def test_a_port_of_this_very_configuration_is_believed_by_its_certificate(authority):
    issued = authority.issue("one", "a.test")
    context = tls.pinned_context(server_files(issued))
    assert context.verify_mode is ssl.CERT_REQUIRED
