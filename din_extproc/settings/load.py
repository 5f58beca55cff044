"""A configuration file, its catalogue and the environment to `Settings`, or to everything that is wrong with them at once.

Rule: all or nothing: settings come out whole, and holders of older ones keep them until then.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from din_extproc.edge.credentials import CredentialUnavailable, read_credential
from din_extproc.edge.registry.catalog_source import CatalogSource, CatalogUnavailable, is_url
from din_extproc.edge.tokenizers import missing
from din_extproc.route.rules import find_thresholds
from din_extproc.settings.assemble import assemble, declares
from din_extproc.settings.audit import AuditSettings, read_audit
from din_extproc.settings.catalog import Catalog, CatalogFile, CatalogModel, CatalogSection
from din_extproc.settings.changes import UNCHANGED, Changes, put_all
from din_extproc.settings.document import Document, read_json, read_yaml
from din_extproc.settings.keys_file import StoredKeys, read_keys
from din_extproc.settings.prices import make_prices
from din_extproc.settings.prices_file import read_prices
from din_extproc.settings.problems import ConfigProblem, ConfigRejected, in_order
from din_extproc.settings.registry import Reaches, RegistryListenSection, Tokens, read_tokens
from din_extproc.settings.remote import REMOTE_ENGINES, make_remote
from din_extproc.settings.schema import DinYaml
from din_extproc.settings.settings import Settings
from din_extproc.settings.shape import ShapedConfig, shape, validated
from din_extproc.settings.tls import report_files, report_unmatched

_FINGERPRINT = 12


def load(
    path: Path, env: Mapping[str, str], source: CatalogSource | None = None, changes: Changes = UNCHANGED
) -> Settings | ConfigRejected:
    """Read `din.yaml`. Files that it names are relative to its folder.

    Args:
        path: The file.
        env: What `${NAME}` inside it stands for.
        source: Knows what catalogues behind URLs were like; None: they are pulled.
        changes: What is put in the place of what it says.
    """
    if isinstance(opened := _read_shaped(path, env, changes), ConfigRejected):
        return opened
    text, document, shaped = opened
    catalog, described, problems = read_catalog(shaped.config.catalog, document, path, source)
    keys_file, hashes, stored = _read_stored_keys(shaped.config.keys_file, document, path)
    assembled = assemble(shaped, None if "catalog" in shaped.broken else catalog, document, stored.tenants)
    keys = stored.joined(assembled.keys, lambda name: "tenants" in shaped.broken and declares(document.data.get("tenants"), name))
    audit, key_files = read_audit(shaped.config.audit, document, path)
    tokens_file, secrets, tokens, reaches, unread = _read_node_tokens(shaped.config.gateway.registry, document, path)
    prices_file, priced, prices, mispriced = read_prices(shaped.config.prices, document, path, assembled.pools)
    found = in_order([*document.problems, *problems, *unread, *stored.problems, *mispriced])
    if assembled.routes is None or catalog is None or not all(problem.warning for problem in found):
        return ConfigRejected(found)
    config = shaped.config
    return Settings(
        file=str(path),
        catalog_source=_describe_source(config.catalog, path),
        catalog_refresh_s=None if config.catalog is None else config.catalog.refresh_s,
        node_tokens_file=tokens_file,
        keys_file=keys_file,
        fingerprint=_compute_fingerprint(text, described, secrets + hashes + priced, audit),
        network=config.network,
        node_tokens=tokens,
        node_reaches=reaches,
        gateway=config.gateway,
        store=config.store,
        catalog=catalog,
        pools=assembled.pools,
        operations=assembled.operations,
        tenants=assembled.tenants,
        global_limits=config.limits.to_global_limits(),
        keys=keys,
        sensitive_patterns=config.sensitive_data.patterns,
        routes=assembled.routes,
        token_thresholds=find_thresholds(rule.rule().when for rule in config.rules),
        health=config.health,
        envoy=config.envoy,
        telemetry=config.telemetry,
        verification=config.verification,
        audit=audit,
        audit_key_files=key_files,
        fail_open_pool=None if config.fail_open is None else config.fail_open.pool,
        prices_file=prices_file,
        budgets=config.budgets.spending(),
        budget_webhook=config.budgets.webhook,
        prices=make_prices(config.prices, prices, assembled.routes.choices),
        identity=config.identity.rules(path.parent, config.defaults),
        warnings=found,
    )


def _read_shaped(path: Path, env: Mapping[str, str], changes: Changes) -> tuple[str, Document, ShapedConfig] | ConfigRejected:
    """The file's text, its data and its sound part."""
    opened = read_document(path, env)
    if isinstance(opened, ConfigRejected):
        return opened
    text, document = opened
    put_all(document, changes)
    shaped = shape(document)
    if shaped is None:
        return ConfigRejected(in_order(document.problems))
    _report_secrets(shaped.config, document, path, env)
    return text, document, shaped


def _report_secrets(config: DinYaml, document: Document, path: Path, env: Mapping[str, str]) -> None:
    """Report certificates and credentials that can't be used."""
    gateway = config.gateway
    _report_credentials(config, document, path, env)
    for index, issuer in enumerate(config.identity.jwt):
        if issuer.jwks.file is not None and not (path.parent / issuer.jwks.file).is_file():
            message = f"{path.parent / issuer.jwks.file} is no file here; Envoy needs it when it starts"
            document.report(("identity", "jwt", index, "jwks", "file"), message, warning=True)
    report_files(config, document, path.parent)
    ports = {"gateway.ext_proc": gateway.ext_proc.tls, "gateway.access_log": gateway.access_log.tls}
    if gateway.xds is not None:
        ports["gateway.xds"] = gateway.xds.tls
    report_unmatched(ports, config.envoy.sidecar_tls, document, ("envoy", "sidecar_tls"))


def _report_credentials(config: DinYaml, document: Document, path: Path, env: Mapping[str, str]) -> None:
    """Report credentials of remote APIs that are not there; they may be on the gateway's machine only."""
    for name, pool in config.pools.items():
        for index, node in enumerate(pool.nodes):
            remote = make_remote(pool.engine, node, path.parent) if pool.engine in REMOTE_ENGINES else None
            try:
                if remote is not None and remote.credential is not None:
                    read_credential(remote.credential, env)
            except CredentialUnavailable as error:
                document.report(("pools", name, "nodes", index, "credential"), str(error), warning=True)


def read_document(path: Path, env: Mapping[str, str]) -> tuple[str, Document] | ConfigRejected:
    """A YAML file's text and its data. Rejected: it can't be read, or holds nothing."""
    text = read_text(path)
    if isinstance(text, ConfigProblem):
        return ConfigRejected((text,))
    document = read_yaml(text, str(path), env)
    if document.data is None:
        return ConfigRejected(in_order(document.problems) or (ConfigProblem(file=str(path), message="the file is empty"),))
    return text, document


def read_text(path: Path) -> str | ConfigProblem:
    """A file's text, or why there is none."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        return ConfigProblem(file=str(path), message=f"not UTF-8 text (byte {error.start})")
    except OSError as error:
        return ConfigProblem(file=str(path), message=f"can't be read: {(error.strerror or str(error)).lower()}")


def _compute_fingerprint(text: str, described: str, secrets: str, audit: AuditSettings | None) -> str:
    keys = b"" if audit is None else b"\0".join(key.secret for key in audit.keys)
    return hashlib.sha256(f"{text}\0{described}\0{secrets}\0".encode() + keys).hexdigest()[:_FINGERPRINT]


def _read_node_tokens(
    section: RegistryListenSection | None, document: Document, path: Path
) -> tuple[str | None, str, Tokens, Reaches, list[ConfigProblem]]:
    """The file of the nodes' tokens, its text, the tokens, where they hold, and what is wrong with them."""
    if section is None:
        return None, "", {}, {}, []
    file = path.parent / section.node_tokens_file
    text = read_text(file)
    if isinstance(text, ConfigProblem):
        document.report(("gateway", "registry", "node_tokens_file"), f"{file}: {text.message}")
        return str(file), "", {}, {}, []
    return str(file), text, *read_tokens(file, text)


def _read_stored_keys(name: str | None, document: Document, path: Path) -> tuple[str | None, str, StoredKeys]:
    """The file of the tenants' keys, its text, and the keys. Before the first key is made there is no such file."""
    if name is None:
        return None, "", read_keys(path, "")
    file = path.parent / name
    text = read_text(file) if file.exists() else ""
    if isinstance(text, ConfigProblem):
        document.report(("keys_file",), f"{file}: {text.message}")
        text = ""
    return str(file), text, read_keys(file, text)


def _describe_source(section: CatalogSection | None, path: Path) -> str | None:
    """The catalogue's file as it is reached from here, or its URL."""
    if section is None or is_url(section.source):
        return None if section is None else section.source
    return str(path.parent / section.source)


def read_catalog(
    section: CatalogSection | None, document: Document, path: Path, pulled: CatalogSource | None = None
) -> tuple[Catalog | None, str, list[ConfigProblem]]:
    """The catalogue of the configuration at `path` (None: there is one, but it is broken), its text, and what is wrong with it."""
    if section is None:
        return Catalog(), "", []
    source = _describe_source(section, path) or ""
    text = _read_catalog_text(source, pulled or CatalogSource())
    if isinstance(text, ConfigProblem):
        document.report(("catalog", "source"), text.message)
        return None, "", []
    folder = (path if is_url(source) else Path(source)).parent
    described = read_json(text, source)
    if described.data is not None:
        file = validated(CatalogFile, described)
        if file is not None:
            _report_duplicate_models(file, described)
            _report_tokenizers(file, described, folder)
            models = [_resolve_tokenizer(model, folder) for model in file.models]
            return Catalog(models), text, described.problems
    return None, text, described.problems


def _read_catalog_text(source: str, pulled: CatalogSource) -> str | ConfigProblem:
    if is_url(source):
        try:
            return pulled.read(source)
        except CatalogUnavailable as error:
            return ConfigProblem(file=source, message=str(error))
    text = read_text(Path(source))
    return ConfigProblem(file=source, message=f"{source}: {text.message}") if isinstance(text, ConfigProblem) else text


def _resolve_tokenizer(model: CatalogModel, folder: Path) -> CatalogModel:
    """The entry with its tokenizer's folder as it is reached from here."""
    return model if model.tokenizer is None else model.model_copy(update={"tokenizer": str(folder / model.tokenizer)})


def _report_duplicate_models(file: CatalogFile, document: Document) -> None:
    seen: set[tuple[str, str]] = set()
    for index, model in enumerate(file.models):
        entry = (model.model_name, model.model_version)
        if entry in seen:
            document.report(("models", index), f"{entry[0]} {entry[1]} is described twice", "keep one of them")
        seen.add(entry)


def _report_tokenizers(file: CatalogFile, document: Document, folder: Path) -> None:
    for index, model in enumerate(file.models):
        if model.tokenizer is not None and not (folder / model.tokenizer).is_dir():
            document.report(("models", index, "tokenizer"), f"{folder / model.tokenizer} is not a folder")
        elif model.tokenizer is not None and missing():
            message = "transformers is not installed: prompts of this model are estimated, never counted"
            document.report(("models", index, "tokenizer"), message, f"pip install '{missing()}'", warning=True)
