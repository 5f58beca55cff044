"""Which Envoys are rendered for."""

import pytest

from din_extproc.control.supported import describe_unsupported, parse_minor
from tests.support.envoy_matrix import VERSIONS


@pytest.mark.parametrize("version", [*VERSIONS, "1.36", "v1.40.0", "1.41.0"])
def test_what_was_tested_and_what_is_newer_is_supported(version):
    assert describe_unsupported(version) is None


@pytest.mark.parametrize(
    ("version", "why"), [("1.35.9", "too old"), ("1.9", "too old"), ("latest", "not a version"), ("1", "not a version")]
)
def test_what_is_older_or_no_version_is_refused_with_the_reason(version, why):
    assert why in describe_unsupported(version)


def test_patches_do_not_matter():
    assert parse_minor("1.38.3") == parse_minor("1.38") == (1, 38)
