"""Who may be where: nodes and the gateway's own addresses."""

import pytest

from din_extproc.domain.node import Endpoint
from din_extproc.edge.registry.auth import is_own

OWN = frozenset({Endpoint("0.0.0.0", 10000), Endpoint("127.0.0.1", 9901), Endpoint("10.9.8.7", 9003)})


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("127.0.0.1:10000", True),
        ("127.0.0.5:10000", True),
        ("[::ffff:127.0.0.1]:10000", True),
        ("[::ffff:127.0.0.1]:9901", True),
        ("127.0.0.1:9901", True),
        ("10.9.8.7:9003", True),
        ("127.0.0.1:9003", False),
        ("192.0.2.7:10000", False),
        ("192.0.2.7:9901", False),
        ("127.0.0.1:8000", False),
    ],
)
def test_the_gateways_own_addresses_are_known_in_every_spelling(address, found):
    assert is_own(Endpoint.parse(address), OWN) is found
