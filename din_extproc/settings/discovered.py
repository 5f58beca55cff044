"""Where a pool's further nodes are found, as the domain knows it."""

from din_extproc.domain.node import Discovery, DnsName, Endpoint
from din_extproc.settings.catalog import Catalog
from din_extproc.settings.document import Document
from din_extproc.settings.pools import PoolNodeSection, PoolSection, make_node
from din_extproc.settings.remote import REMOTE_ENGINES


def make_discovery(name: str, pool: PoolSection, catalog: Catalog | None, document: Document) -> Discovery | None:
    """Return where the pool's further nodes are found, with the catalogue's values filled in. What can't be filled in is reported."""
    section = pool.discover
    if section is None:
        return None
    place = ("pools", name, "discover")
    if pool.engine in REMOTE_ENGINES:
        document.report(place, f"nodes of engine {pool.engine} are not found by DNS", "list them with a `url`")
        return None
    common = section.model_dump(include=set(PoolNodeSection.model_fields))
    anywhere = PoolNodeSection.model_construct(id=f"{name}-discovered", address=Endpoint("127.0.0.1", 1), **common)
    template = make_node(pool, anywhere, catalog, document, place)
    if template is None:
        return None
    found_by, colon, port = section.dns.rpartition(":")
    return Discovery(DnsName(found_by if colon else section.dns, int(port) if colon else 0, section.every_s, section.server), template)
