"""node.yaml, the configuration of a node's agent: the node, which engine it serves, where its registry is, and the Envoy in front.

Rule: what the catalogue says of the model is not said again; a node says only where it differs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace
from pydantic import AfterValidator, BeforeValidator, Field

from din_extproc.control.topology import Address, Retry, SocketAddress, Timeouts, TlsTrust, Topology, UnixSocket
from din_extproc.domain.node import Endpoint, Node, Pool
from din_extproc.domain.request import Operation
from din_extproc.edge.tls import ClientFiles
from din_extproc.flow.node_handler import ENGINE
from din_extproc.schedule.batch import BatchLimits
from din_extproc.settings.catalog import Catalog, CatalogSection, VersionText
from din_extproc.settings.document import Document
from din_extproc.settings.envoy import LoopbackAddress, off_is_none
from din_extproc.settings.gateway import ExtProcSection, ListenSection, as_reached
from din_extproc.settings.load import read_catalog, read_document
from din_extproc.settings.operations import Engine, OwnOperations, make_operations_table
from din_extproc.settings.problems import ConfigProblem, ConfigRejected, in_order
from din_extproc.settings.section import AsTuple, ListenAddress, ModelName, Name, NameIfAny, NodeAddress, Positive, Section, Text
from din_extproc.settings.shape import validated
from din_extproc.settings.tls import ClientTlsSection, EnvoyTlsSection, ServerTlsSection, report_files, report_unmatched
from din_extproc.southbound.load import SOURCES

_MIB = 1 << 20
_WAIT_MARGIN_MS = 5_000


def _http(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no address such as http://127.0.0.1:8000")
    return url.rstrip("/")


Url = Annotated[str, AfterValidator(_http)]


class NodeIdentitySection(Section):
    """`node:`, who it is. What is left out comes from the model's catalogue entry."""

    id: Name
    address: NodeAddress
    """Where gateways send requests: the engine's, or that of the Envoy in front of it."""
    model: ModelName
    version: VersionText
    dtype: Name | None = None
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")] | None = None
    tp_world_size: Positive | None = None
    max_seq_len: Positive | None = None
    max_concurrency: Positive = 64
    network: NameIfAny = ""
    pool: NameIfAny = ""
    """The pool it wants to join; "": every pool of the same kind."""


class EngineSection(Section):
    """`engine:`, what the agent asks."""

    kind: Engine
    address: NodeAddress
    """Of its HTTP interface, as it is reached from here."""
    served_model: Text | None = None
    """The name that it answers to, when that is not the model's."""
    metrics_url: Url | None = None
    """None: at the engine's usual port and path."""
    all_models: bool = False
    """Also register every other model that the engine lists, such as an adapter (LoRA), under the engine's name and the node's version."""


class WeightsSection(Section):
    """`weights:`, the weights that are compared with the catalogue's sha256."""

    path: Text
    """A file, or a folder with all files of the model."""
    cache: Text | None = None
    """Where digests are kept; None: in the user's cache folder."""


class RegistrySection(Section):
    """`registry:`, whom the node tells."""

    addresses: Annotated[tuple[Url, ...], AsTuple, Field(min_length=1)]
    """Of any replicas of one gateway; the first that answers is used."""
    tls: ClientTlsSection | None = None
    """For `https` addresses whose certificates no public authority issued, and for those that want ours."""
    token_file: Text | None = None
    """Holds the node's token, and nothing else."""
    heartbeat_s: Annotated[float, Field(strict=False, ge=0.1, le=60)] = 3.0


class BatchSection(Section):
    """`batch:`, requests of like length wait for each other."""

    max_batch_tokens: Positive = 8192
    max_wait_ms: Annotated[int, Field(ge=0, le=10_000)] = 50


class ProxySection(Section):
    """`proxy:`, the Envoy in front of the engine."""

    ext_proc: ExtProcSection = ExtProcSection(socket="/run/din/node.sock")
    listener: ListenAddress = Endpoint("0.0.0.0", 8080)
    admin: LoopbackAddress = Endpoint("127.0.0.1", 9902)
    sidecar_tls: EnvoyTlsSection | None = None
    """How that Envoy connects to the agent's ports that have a `tls`."""
    body_limit_mib: Annotated[int, Field(ge=1, le=1024)] = 32
    batch: Annotated[BatchSection | None, BeforeValidator(off_is_none)] = BatchSection()


class NodeYaml(Section):
    """The file."""

    version: Literal[1]
    node: NodeIdentitySection
    engine: EngineSection
    registry: RegistrySection
    catalog: CatalogSection | None = None
    weights: WeightsSection | None = None
    health: ListenSection = ListenSection(address=Endpoint("0.0.0.0", 9095))
    """Where `/health` is answered."""
    drain_s: Annotated[float, Field(strict=False, ge=0, le=3600)] = 30.0
    """How long requests may go on after SIGTERM."""
    proxy: ProxySection | None = None
    """None: there is no Envoy in front of the engine."""
    operations: OwnOperations = Field(default_factory=dict)
    """As in `din.yaml`, where there is an Envoy in front of the engine: it takes no other paths."""


class NodeSettings(Struct, frozen=True, kw_only=True):
    """A node's configuration in use."""

    file: str
    node: Node
    network: str
    pool: str
    engine: str
    engine_endpoint: Endpoint
    served_model: str
    all_models: bool
    metrics_url: str
    weights: Path | None
    weights_cache: Path | None
    """None: in the user's cache folder."""
    sha256: str
    """Of the weights, by the catalogue; "": it does not say."""
    registries: tuple[str, ...]
    registry_tls: ClientFiles | None
    """None: plain, or as the system's authorities say."""
    token_file: Path | None
    heartbeat_s: float
    health: ListenSection
    drain_s: float
    proxy: ProxySection | None
    operations: Mapping[str, Operation]
    warnings: tuple[ConfigProblem, ...] = ()

    @property
    def engine_url(self) -> str:
        """Without a slash at the end."""
        return f"http://{self.engine_endpoint}"

    @property
    def window(self) -> BatchLimits | None:
        """The batch window. None: requests go as they come."""
        batch = self.proxy.batch if self.proxy is not None else None
        return None if batch is None else BatchLimits(batch.max_batch_tokens, batch.max_wait_ms / 1000)

    @property
    def body_limit(self) -> int:
        """The largest request body, in bytes."""
        return (self.proxy or ProxySection()).body_limit_mib * _MIB

    def make_topology(self) -> Topology:
        """The topology of the Envoy in front of the engine: a gateway with one node, that node's engine."""
        proxy = self.proxy or ProxySection()
        wait_ms = 0 if proxy.batch is None else proxy.batch.max_wait_ms
        engine = Pool(
            name=ENGINE,
            model=self.node.model,
            served_model=self.served_model,
            engine=self.engine,
            scheduler="round_robin",
            nodes=(replace(self.node, endpoint=self.engine_endpoint),),
        )
        return Topology(
            ext_proc=(self._ext_proc(proxy),),
            access_log=None,
            agent=as_reached(self.health.address, tls=self._trust(self.health.tls)),
            pools=(engine,),
            listener=SocketAddress(proxy.listener.host, proxy.listener.port),
            admin=SocketAddress(proxy.admin.host, proxy.admin.port),
            body_limit_bytes=self.body_limit,
            timeouts=Timeouts(message_ms=wait_ms + _WAIT_MARGIN_MS),
            retry=Retry(attempts=0),
            outlier=None,
            health_check=None,
        )

    @property
    def folder(self) -> Path:
        """Base folder of relative paths in the file."""
        return Path(self.file).parent

    def _ext_proc(self, proxy: ProxySection) -> Address:
        section = proxy.ext_proc
        return UnixSocket(section.socket or "") if section.address is None else as_reached(section.address, tls=self._trust(section.tls))

    def _trust(self, tls: ServerTlsSection | None) -> TlsTrust | None:
        """How the Envoy in front connects to a port with this `tls`."""
        envoy = None if self.proxy is None else self.proxy.sidecar_tls
        return None if tls is None or envoy is None else envoy.trust(self.folder)


def load_node(path: Path, env: Mapping[str, str]) -> NodeSettings | ConfigRejected:
    """Read `node.yaml`. Files that it names are relative to its folder.

    Args:
        path: The file.
        env: What `${NAME}` inside it stands for.
    """
    opened = read_document(path, env)
    if isinstance(opened, ConfigRejected):
        return opened
    _, document = opened
    config = validated(NodeYaml, document)
    if config is None:
        return ConfigRejected(in_order(document.problems))
    catalog, _, problems = read_catalog(config.catalog, document, path)
    report_files(config, document, path.parent)
    if config.proxy is not None:
        ports = {"proxy.ext_proc": config.proxy.ext_proc.tls, "health": config.health.tls}
        report_unmatched(ports, config.proxy.sidecar_tls, document, ("proxy", "sidecar_tls"))
    made = None if catalog is None else _settings(config, catalog, document, path)
    found = in_order([*document.problems, *problems])
    if made is None or not all(problem.warning for problem in found):
        return ConfigRejected(found)
    return replace(made, warnings=found)


def _settings(config: NodeYaml, catalog: Catalog, document: Document, path: Path) -> NodeSettings | None:
    node, folder = _node(config, catalog, document), path.parent
    entry = catalog.versions(config.node.model).get(config.node.version)
    sha256 = (entry.sha256 if entry is not None else None) or ""
    if sha256 and config.weights is None:
        document.report(("weights",), "the catalogue knows the weights' sha256", "say where they are: `weights: { path: ... }`")
    if node is None:
        return None
    engine, weights = config.engine, config.weights
    source = SOURCES[engine.kind]
    metrics = f"http://{Endpoint(engine.address.host, source.port or engine.address.port)}{source.path}"
    return NodeSettings(
        file=str(path),
        node=node,
        network=config.node.network,
        pool=config.node.pool,
        engine=engine.kind,
        engine_endpoint=engine.address,
        served_model=engine.served_model or node.model,
        all_models=engine.all_models,
        metrics_url=engine.metrics_url or metrics,
        weights=None if weights is None else folder / weights.path,
        weights_cache=None if weights is None or weights.cache is None else folder / weights.cache,
        sha256=sha256,
        registries=config.registry.addresses,
        registry_tls=None if config.registry.tls is None else config.registry.tls.files(folder),
        token_file=None if config.registry.token_file is None else folder / config.registry.token_file,
        heartbeat_s=config.registry.heartbeat_s,
        health=config.health,
        drain_s=config.drain_s,
        proxy=config.proxy,
        operations=make_operations_table(config.operations, document),
    )


def _node(config: NodeYaml, catalog: Catalog, document: Document) -> Node | None:
    """The node with the catalogue's values filled in; what can't be filled in is reported."""
    section = config.node
    versions = catalog.versions(section.model)
    entry = versions.get(section.version)
    if versions and entry is None:
        document.report(("node", "version"), f"the catalogue has {section.model!r} in versions {', '.join(versions)}")
        return None
    found = {
        "dtype": section.dtype or (entry.dtype if entry else None),
        "max_seq_len": section.max_seq_len or (entry.max_seq_len if entry else None),
        "tp_world_size": section.tp_world_size or (entry.tensor_parallel if entry else 1),
    }
    for name, value in found.items():
        if value is None:
            document.report(("node",), f"{name} is missing", "give it here, or in the model's catalogue entry")
    if None in found.values():
        return None
    return Node(
        id=section.id,
        endpoint=section.address,
        model=section.model,
        version=section.version,
        compute_capability=section.compute_capability or "",
        max_concurrency=section.max_concurrency,
        **found,  # type: ignore[arg-type]
    )
