"""Generate `din_extproc/_proto/` from the `.proto` files beside this script; with `--check`, say whether it is up to date.

Rule: what is committed is exactly what this script makes, whatever versions of the compiler and of protobuf made it.

The compiler's output is changed in three ways: imports point into `din_extproc._proto`, messages are registered in the pool of
`din_extproc._proto.pool`, and the test for the compiler's own protobuf version is left out (any protobuf that we allow runs the code).
"""

import re
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

SOURCES = Path(__file__).resolve().parent
ROOT = SOURCES.parent
TARGET = ROOT / "din_extproc" / "_proto"
PACKAGE = "din_extproc._proto"
WELL_KNOWN = Path(grpc_tools.__file__).parent / "_proto"

_REWRITES = (
    (re.compile(r"^# Protobuf Python Version: .*\n", re.MULTILINE), ""),
    (re.compile(r"^from google\.protobuf import runtime_version as _runtime_version\n", re.MULTILINE), ""),
    (re.compile(r"^_runtime_version\.ValidateProtobufRuntimeVersion\(\n(?: .*\n)*\)\n", re.MULTILINE), ""),
    (
        re.compile(r"^from google\.protobuf import descriptor_pool as _descriptor_pool$", re.MULTILINE),
        f"from {PACKAGE}.pool import POOL as _POOL",
    ),
    (re.compile(r"_descriptor_pool\.Default\(\)"), "_POOL"),
    (
        re.compile(r"^from (?!google\.protobuf)((?:envoy|google|grpc|din)\.[\w.]+) import (\w+_pb2)", re.MULTILINE),
        rf"from {PACKAGE}.\1 import \2",
    ),
    (re.compile(r"(BuildTopDescriptorsAndMessages\(DESCRIPTOR, ')"), rf"\1{PACKAGE}."),
)


def sources() -> list[str]:
    """Every `.proto` file, relative to this folder."""
    return sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.proto"))


def rewritten(text: str) -> str:
    """One generated file as we keep it."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def generated() -> dict[Path, str]:
    """What `_proto/` should hold, by path relative to it. Raises `SystemExit` with the compiler's status when it refuses a file."""
    with tempfile.TemporaryDirectory() as scratch:
        status = protoc.main(["protoc", f"-I{SOURCES}", f"-I{WELL_KNOWN}", f"--python_out={scratch}", f"--pyi_out={scratch}", *sources()])
        if status:
            raise SystemExit(status)
        out = Path(scratch)
        files = {path.relative_to(out): rewritten(path.read_text()) for path in out.rglob("*.py*")}
    packages = {folder for path in files for folder in path.parents if folder != Path()}
    return files | {folder / "__init__.py": "" for folder in packages}


def committed() -> dict[Path, str]:
    """What `_proto/` holds, without the two files written by hand at its top."""
    return {
        path.relative_to(TARGET): path.read_text()
        for path in TARGET.rglob("*.py*")
        if path.suffix in {".py", ".pyi"} and path.parent != TARGET
    }


def main(arguments: list[str]) -> int:
    """Write the files, or with `--check` name those that differ. Returns the exit status: 1 when something differs."""
    wanted, there = generated(), committed()
    differing = sorted(path for path in wanted.keys() | there.keys() if wanted.get(path) != there.get(path))
    if arguments == ["--check"]:
        for path in differing:
            print(f"{(TARGET / path).relative_to(ROOT)} is not what proto/ says: run `make proto`", file=sys.stderr)
        return 1 if differing else 0
    if arguments:
        print("usage: python proto/generate.py [--check]", file=sys.stderr)
        return 2
    for path in differing:
        if path in wanted:
            (TARGET / path).parent.mkdir(parents=True, exist_ok=True)
            (TARGET / path).write_text(wanted[path])
        else:
            (TARGET / path).unlink()
    print(f"{len(wanted)} files in {TARGET.relative_to(ROOT)}, {len(differing)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
