"""Programs that call `nvrx.launch`; run as `python -m tests.e2e.launching NAME` or as a file."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import nvrx


class Doubled:
    """A value whose class is known in this program alone."""

    def __init__(self, value: int) -> None:
        self.value = 2 * value


def work(first: str, second: int) -> tuple[str, Doubled, list[str], str]:
    print(f"rank {os.environ['RANK']} works")
    return first, Doubled(second), sys.argv[1:], __name__


def fails_once(directory: str) -> int:
    cycle = int(os.environ["NVRX_CYCLE"])
    if cycle == 0:
        (Path(directory) / f"was-here-{os.environ['RANK']}").touch()
        raise RuntimeError("the first time")
    return cycle


def fails() -> None:
    raise SystemExit(7)


def _config(directory: str, **more: object) -> dict[str, object]:
    return {"log_dir": directory, "run_id": "launched", "restart_backoff": 0, **more}


def main(name: str, directory: str) -> None:
    match name:
        case "function":
            held = threading.Lock()
            with held:  # nothing of this program is shared with workers
                found = nvrx.launch(work, "one", 21, config=_config(directory, nproc_per_node=2))
            for rank, (first, doubled, argv, module) in found.items():
                print(f"{rank}: {first} {doubled.value} {argv} {module}")
        case "again":
            print(nvrx.launch(fails_once, directory, config=_config(directory, nproc_per_node=2)))
        case "failure":
            try:
                nvrx.launch(fails, config=_config(directory, max_restarts=0))
            except nvrx.LaunchFailed as error:
                print(f"{error.exit_code} {error}")
        case "command":
            words = ["sh", "-c", 'printf "%s\\n" "$@" > "$0"', f"{directory}/said"]
            print(nvrx.launch(words, "a b", "--", 3, config=_config(directory)))
        case "usage":
            nvrx.launch(["true"], config={"nodes": 2})
        case "forever":
            nvrx.launch([sys.executable, "-m", "tests.e2e.workers.obey"], config=_config(directory))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
