"""The shipped manifests, checked with the tools that people use there: helm, kubeconform, Compose's own loader, Istio's translator.

Rule: Go builds the tools from their modules at fixed versions; `make test` checks the same without them.
Istio's translator is a build of several minutes the first time. The proxies that it makes are run, in front of a real sidecar.
Run: python -m tests.support.manifest_tools [helm] [kubeconform] [compose] [istio]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import kubernetes_validate
import yaml

from tests.deploy.shipped import DEPLOY
from tests.deploy.test_chart import CHART, EXAMPLE, VARIANTS, merged, rendered
from tests.golden.test_mesh_rendering import HERE as MESH
from tests.golden.test_mesh_rendering import SCHEMAS

ROOT = Path(__file__).parents[2]
HELM = "helm.sh/helm/v3/cmd/helm@v3.22.0"
KUBECONFORM = "github.com/yannh/kubeconform/cmd/kubeconform@v0.8.0"
COMPOSE = Path(__file__).parents[1] / "tools" / "compose_config"
ISTIO = Path(__file__).parents[1] / "tools" / "istio_translate"
KUBERNETES = ("1.30", "1.34", "1.37")
_KUBERNETES_SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
_ELSEWHERE = "/api/_definitions.json#"


def go(*arguments: str, folder: Path | None = None) -> str:
    """Build and run a Go program; return its output, or exit with its failure."""
    return run("go", "run", *arguments, folder=folder, GOFLAGS="-mod=mod")


def run(*command: str, folder: Path | None = None, **variables: str) -> str:
    """Run a command with further variables of the environment; return its output, or exit with its failure."""
    done = subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def helm(folder: Path) -> str:
    """Lint the chart, and compare Helm's rendering with the one of our tests."""
    for name, values in VARIANTS.items():
        file = folder / "values.yaml"
        file.write_text(yaml.safe_dump(merged(EXAMPLE, values)))
        go(HELM, "lint", "--strict", str(CHART), "-f", str(file))
        text = go(HELM, "template", "din", str(CHART), "-n", "inference", "--kube-version", f"{KUBERNETES[-1]}.0", "-f", str(file))
        if ordered([each for each in yaml.safe_load_all(text) if each]) != ordered(rendered(values)):
            sys.exit(f"helm template differs: {name}")
    return f"{len(VARIANTS)} sets of values: lint has no complaint, template gives the same manifests"


def ordered(manifests: list[dict[str, object]]) -> list[str]:
    return sorted(json.dumps(each, sort_keys=True) for each in manifests)


def kubeconform(folder: Path) -> str:
    """Validate the manifests of the chart, Istio and Envoy Gateway against the published schemas that exist locally."""
    manifests = folder / "manifests"
    manifests.mkdir()
    for number, values in enumerate(VARIANTS.values()):
        (manifests / f"chart-{number}.yaml").write_text(yaml.safe_dump_all(rendered(values)))
    for file in MESH.glob("*-*.yaml"):
        (manifests / file.name).write_text(file.read_text())
    schemas = folder / "schemas"
    schemas.mkdir()
    for file in SCHEMAS.glob("*.json"):
        (schemas / file.name.lower()).write_text(file.read_text())
    results = []
    for version in KUBERNETES:
        write_standalone(version, schemas)
        where = [f"{schemas}/{{{{ .ResourceKind }}}}{{{{ .KindSuffix }}}}.json"]
        where.append(f"{schemas}/{{{{ .Group }}}}_{{{{ .ResourceAPIVersion }}}}_{{{{ .ResourceKind }}}}.json")
        locations = [word for each in where for word in ("-schema-location", each)]
        results.append(go(KUBECONFORM, "-strict", "-summary", "-ignore-missing-schemas", *locations, str(manifests)).strip())
    return "\n".join(f"Kubernetes {version}: {result}" for version, result in zip(KUBERNETES, results, strict=True))


def write_standalone(version: str, folder: Path) -> None:
    """Return Kubernetes' strict schemas with inlined definitions: kubeconform follows no reference to another local file."""
    source = _KUBERNETES_SCHEMAS / f"v{version}.0-local-strict"
    definitions = json.loads((source / "_definitions.json").read_text())["$defs"]
    kinds = {(each["kind"].lower(), each["apiVersion"]) for values in VARIANTS.values() for each in rendered(values)}
    for kind, api in kinds:
        group, _, release = api.rpartition("/")
        file = f"{kind}-{group.split('.')[0]}-{release}.json" if group else f"{kind}-{release}.json"
        if (source / file).exists():
            schema = json.loads((source / file).read_text().replace(_ELSEWHERE, "#"))
            (folder / file).write_text(json.dumps({**schema, "$defs": definitions}))


def compose(_folder: Path) -> str:
    """Load and resolve the compose file as `docker compose config` does."""
    project = yaml.safe_load(go(".", str(DEPLOY / "compose" / "compose.yaml"), folder=COMPOSE))
    return f"{len(project['services'])} services: loaded and resolved"


def istio(folder: Path) -> str:
    """Have Istio translate what is rendered, and run the proxies that it makes in front of a real sidecar."""
    program = folder / "istio_translate"
    run("go", "build", "-o", str(program), ".", folder=ISTIO, GOFLAGS="-mod=mod", CGO_ENABLED="0")
    results = run(sys.executable, "-m", "pytest", "-q", "tests/e2e/test_istio.py", folder=ROOT, DIN_ISTIO_TRANSLATOR=str(program))
    return results.strip().splitlines()[-1]


TOOLS: dict[str, Callable[[Path], str]] = {"helm": helm, "kubeconform": kubeconform, "compose": compose, "istio": istio}


def main() -> None:
    """Run the tools from the command line."""
    parser = argparse.ArgumentParser(description="Hold what is shipped against helm, kubeconform and Compose's loader; needs Go.")
    parser.add_argument("tools", nargs="*", choices=[*TOOLS, []], help="all of them when none is given")
    for name in parser.parse_args().tools or TOOLS:
        with tempfile.TemporaryDirectory(prefix="din-manifests-") as folder:
            print(f"{name}: {TOOLS[name](Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
