"""A pool of a hosted API beside a local one: what TLS, the credential and the extra hop inside Envoy cost a request."""

import trustme

from tests.bench import contenders
from tests.bench.contenders import EVERYTHING
from tests.bench.field import Field, Figures
from tests.bench.harness import median

_CONNECTIONS = 16


def hosted(field: Field) -> Figures:
    """CPU of the whole stack per request that goes to a hosted API, ÷ to a local node; connections are kept."""
    local = field.contender(EVERYTHING)
    assert local is not None
    authority = trustme.CA()
    authority.cert_pem.write_to_path(field.folder / "hosted-ca.pem")
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(field.folder / "hosted.pem")
    cloud = contenders.hosted(field.exits, field.node_ports, field.folder)
    ratios, spent_us = [], []
    for _ in range(max(1, field.effort.rounds)):
        one, other = (field.spend(each, field.request(each), connections=_CONNECTIONS) for each in (cloud, local))
        spent_us.append(sum(one.cpu_us.values()))
        ratios.append(spent_us[-1] / sum(other.cpu_us.values()))
    return {"stack_cpu_hosted_vs_local": median(ratios), "cpu_us_hosted": median(spent_us)}
