"""An identity provider as operators have it: signed tokens, and its public keys in a file or behind an HTTPS server."""

import json
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key

ISSUER, AUDIENCE = "https://issuer.example", "inference"


def make_signer() -> RSAPrivateKey:
    """Return a new key pair."""
    return generate_private_key(65537, 2048)


def jwks(**keys: RSAPrivateKey) -> str:
    """Return the public keys by their `kid`, as a JWKS document."""
    to_jwk = jwt.algorithms.RSAAlgorithm.to_jwk
    public = [to_jwk(key.public_key(), as_dict=True) | {"kid": kid, "alg": "RS256"} for kid, key in keys.items()]
    return json.dumps({"keys": public})


def make_claims(team: object = "acme", **changed: object) -> dict[str, object]:
    """Return the claims of a sound token; None leaves a claim out."""
    content = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ann", "exp": int(time.time()) + 600, "org": {"team": team}} | changed
    return {name: value for name, value in content.items() if value is not None}


def sign(key: RSAPrivateKey, content: dict[str, object], kid: str = "one") -> str:
    """Return a token."""
    return jwt.encode(content, key, algorithm="RS256", headers={"kid": kid})


def bearer_cases(signer: RSAPrivateKey, key: str, foreign_key: str) -> dict[str, tuple[dict[str, str], int]]:
    """Return requests by name: their headers and the status of the answer.

    Args:
        signer: The issuer's key pair; its tokens are of tenant acme.
        key: An API key of that tenant.
        foreign_key: An API key of another one.
    """
    token = sign(signer, make_claims())
    unsigned = jwt.encode(make_claims(), None, algorithm="none")
    authorized = {
        "token": (token, 200),
        "key": (key, 200),
        "expired": (sign(signer, make_claims(exp=1_700_000_000)), 401),
        "endless": (sign(signer, make_claims(exp=None)), 401),
        "another audience": (sign(signer, make_claims(aud="another")), 401),
        "another issuer": (sign(signer, make_claims(iss="https://another.example")), 401),
        "another signer": (sign(make_signer(), make_claims()), 401),
        "unsigned": (unsigned, 401),
    }
    cases = {name: ({"authorization": f"Bearer {text}"}, status) for name, (text, status) in authorized.items()}
    cases["two tenants"] = ({"authorization": f"Bearer {token}", "x-api-key": foreign_key}, 403)
    cases["forged header"] = ({"x-jwt-payload": token.split(".")[1], "x-tenant": "acme"}, 401)
    return cases


class KeyServer:
    """An HTTPS server of one JWKS document, on a free port of 127.0.0.1. A context manager.

    Args:
        served: The certificate, as `Authority.issue` returns it.
        document: What it answers at first.
    """

    def __init__(self, served: dict[str, str], document: str) -> None:
        self.document = document
        self.asked = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked += 1
                body = outer.document.encode()
                self.send_response(200 if self.path == "/keys?set=1" else 404)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(served["cert"], served["key"])
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        """Where the document is."""
        return f"https://127.0.0.1:{self._server.server_port}/keys?set=1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def write_jwks(file: Path, **keys: RSAPrivateKey) -> None:
    """Write the public keys."""
    file.write_text(jwks(**keys))
