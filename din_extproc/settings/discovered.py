"""Where a pool's further nodes are found, as the domain knows it."""

from pathlib import Path

from din_extproc.domain.node import Discovery, DnsName, Endpoint, KubernetesObjects
from din_extproc.settings.catalog import Catalog
from din_extproc.settings.discover import DiscoverSection
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
        document.report(place, f"nodes of engine {pool.engine} are remote APIs, which can't be found", "list them with a `url`")
        return None
    common = section.model_dump(include=set(PoolNodeSection.model_fields))
    anywhere = PoolNodeSection.model_construct(id=f"{name}-discovered", address=Endpoint("127.0.0.1", 1), **common)
    template = make_node(pool, anywhere, catalog, document, place)
    if template is None:
        return None
    others = () if catalog is None else catalog.versions(pool.model).keys() - {template.version}
    made = (make_node(pool, anywhere.model_copy(update={"version": each}), catalog, document, place) for each in sorted(others))
    versions = {node.version: node for node in made if node is not None}
    return Discovery(_make_source(section, Path(document.file).parent), template, versions)


def _make_source(section: DiscoverSection, folder: Path) -> DnsName | KubernetesObjects:
    """Return the source. Files are relative to the folder of the configuration."""
    objects = section.kubernetes
    if objects is not None:
        return KubernetesObjects(
            namespace=objects.namespace,
            port=objects.port,
            service=objects.service or "",
            selector=objects.selector or "",
            kubeconfig=str(folder / objects.kubeconfig) if objects.kubeconfig else "",
            context=objects.context or "",
        )
    text = section.dns or ""
    name, colon, port = text.rpartition(":")
    return DnsName(name if colon else text, int(port) if colon else 0, section.every_s, section.server)
