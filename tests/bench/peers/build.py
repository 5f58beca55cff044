"""Build the Go gateways that `make bench` compares with. Run: python -m tests.bench.peers.build [NAME...]

Each is built at a pinned commit: from a shallow clone, or from `DIN_PEER_SOURCES/<repository>`, a folder of source trees for machines
that can't clone. The dependencies of a module come from the Go module proxy in both cases.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from msgspec import Struct

BINARIES = Path(__file__).parents[3] / ".venv-peers" / "go"
SOURCES = "DIN_PEER_SOURCES"


class Source(Struct, frozen=True):
    """The origin of a program: repository and commit, package, build tags."""

    owner: str
    repository: str
    commit: str
    package: str
    tags: str = ""


PROGRAMS = {
    "ratelimit": Source("envoyproxy", "ratelimit", "f2fb15770f7fd1c88ca6c3a1b58ee513917ace96", "./src/service_cmd"),
    "aigw-extproc": Source("envoyproxy", "ai-gateway", "c217da8a539570ba3f6014a60c2687c29a945f1f", "./cmd/extproc"),
    "aibrix-gateway": Source("vllm-project", "aibrix", "e3e10f9e4aebe9aac5e7d992fb87d2648e01628b", "./cmd/plugins", "nozmq"),
    "llm-d-epp": Source("llm-d", "llm-d-router", "ebab687927f5331c1b39defcb579a07951bce56c", "./cmd/epp"),
}


def _tree(source: Source, folder: Path) -> Path:
    """Return the source tree: the given one, or a shallow clone in the folder."""
    if SOURCES in os.environ:
        return Path(os.environ[SOURCES]) / source.repository
    tree = folder / source.repository
    url = f"https://github.com/{source.owner}/{source.repository}"
    for command in (
        ["git", "init", "-q", tree],
        ["git", "-C", tree, "fetch", "-q", "--depth", "1", url, source.commit],
        ["git", "-C", tree, "checkout", "-q", "FETCH_HEAD"],
    ):
        subprocess.run(command, check=True)
    return tree


def build(name: str) -> None:
    """Build a program into `.venv-peers/go`.

    Raises:
        CalledProcessError: git or the Go toolchain failed; its output gives the reason.
        FileNotFoundError: the given sources don't contain its repository.
    """
    source = PROGRAMS[name]
    BINARIES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="din-peers-") as folder:
        tree = _tree(source, Path(folder))
        command = ["go", "build", "-buildvcs=false", "-tags", source.tags, "-o", BINARIES / name, source.package]
        subprocess.run(command, cwd=tree, check=True)


def main() -> int:
    """Build the requested programs, or all; the exit code is 1 if one failed."""
    if shutil.which("go") is None:
        print("no Go toolchain: the Go gateways are left out", file=sys.stderr)
        return 0
    failed = 0
    for name in sys.argv[1:] or PROGRAMS:
        print(f"building {name}", flush=True)
        try:
            build(name)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            print(f"{name} was not built: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
