"""Checks that nvrx/v1 is what protos/generate.py makes of protos/: prints one line, exits 1 when it is stale.

Run as a script by `make check`; a test runs the same check. Needs .venv-protos and imports nothing of nvrx.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILER = ROOT / ".venv-protos" / "bin" / "python"
CHECKED_IN = ROOT / "nvrx" / "v1"


def contents(folder: Path) -> dict[str, bytes]:
    """Returns name -> bytes of the files in `folder`, without byte code."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.suffix != ".pyc"}


def stale_files() -> list[str]:
    """Returns the names of files in nvrx/v1 that differ from generated ones, are missing, or are extra."""
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run([COMPILER, ROOT / "protos" / "generate.py", temporary], check=True)
        fresh = contents(Path(temporary))
    present = contents(CHECKED_IN)
    return sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))


def main() -> int:
    if not COMPILER.exists():
        print("nvrx/v1 cannot be checked: .venv-protos is missing; run `make protos`")
        return 1
    stale = stale_files()
    if stale:
        print(f"nvrx/v1 is stale ({', '.join(stale)}); run `make protos`")
        return 1
    print("nvrx/v1 is fresh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
