"""A worker whose work is a Python function (`nvrx.launch`): `python -m nvrx.client.function_worker NAME`.

The function comes in a file of the launching program's own. NAME is for people, and for nodes to be compared by.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import Any

FILE = "NVRX_FUNCTION"


@dataclass(frozen=True)
class Result:
    """What a function returned."""

    cycle: int
    rank: int
    value: Any


def main() -> None:
    """Call the function; keep what it returns beside it."""
    file = Path(os.environ[FILE])
    preparation, packed = pickle.loads(file.read_bytes())
    spawn.prepare(preparation)  # sys.path, sys.argv, and the program as a module
    function, args = pickle.loads(packed)
    value = function(*args)
    cycle, rank = int(os.environ["NVRX_CYCLE"]), int(os.environ["RANK"])
    content = pickle.dumps(Result(cycle, rank, value))
    file.with_name(f"{file.name}.{cycle}.{rank}").write_bytes(content)


def read_result(path: Path) -> Result:
    """What a worker kept."""
    found = pickle.loads(path.read_bytes())
    assert isinstance(found, Result)
    return found


if __name__ == "__main__":
    # Under this name, so that what is kept can be read where no such program runs.
    from nvrx.client import function_worker

    function_worker.main()
