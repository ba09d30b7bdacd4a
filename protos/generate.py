"""Generates the Python code of the wire contract: `generate.py OUTDIR`, from every .proto below this folder.

Runs on the old compiler of constraints-protos.txt: its code works with newer protobuf runtimes, never the
reverse. Imports nothing of nvrx. The tree of .proto files repeats the import path, so the generated imports
need no patching.
"""

import shutil
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
PACKAGE = Path("nvrx", "v1")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")
INIT = '"""Generated from protos/nvrx/v1 by `make protos`; do not edit."""\n'


def compile_protos(out: Path) -> None:
    """Writes the code of all .proto files to `out`, in the folders of their packages."""
    scripts = Path(sys.executable).parent
    sources = sorted(path.relative_to(PROTOS).as_posix() for path in PROTOS.rglob("*.proto"))
    arguments = [
        "protoc",
        f"--proto_path={PROTOS}",
        f"--proto_path={resources.files('grpc_tools') / '_proto'}",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        *(f"--{plugin}_out={out}" for plugin in ("python", "grpc_python")),
        *(f"--{plugin}_out=quiet:{out}" for plugin in ("mypy", "mypy_grpc")),
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed; see above")


def replace_generated(new: Path, outdir: Path) -> None:
    """Puts the generated files of `new` in place of those in `outdir`, and leaves all other files alone."""
    outdir.mkdir(parents=True, exist_ok=True)
    for pattern in GENERATED:
        for old in outdir.glob(pattern):
            old.unlink()
    for pattern in GENERATED:
        for path in sorted(new.glob(pattern)):
            shutil.copyfile(path, outdir / path.name)
    (outdir / "__init__.py").write_text(INIT, encoding="utf-8")


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: generate.py OUTDIR", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        compile_protos(Path(temporary))
        replace_generated(Path(temporary) / PACKAGE, Path(argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
