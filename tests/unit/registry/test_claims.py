"""Addresses that a registering node may not have unless its token allows them."""

import pytest

from din_extproc.domain.node import Endpoint
from din_extproc.registry.claims import is_link_local


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("169.254.169.254:80", True),
        ("[fe80::1]:8000", True),
        ("[::ffff:169.254.169.254]:80", True),
        ("10.0.0.7:8000", False),
        ("127.0.0.1:1", False),
    ],
)
def test_a_clouds_metadata_address_is_link_local_in_every_spelling(address, found):
    assert is_link_local(Endpoint.parse(address)) is found
