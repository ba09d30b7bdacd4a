"""`nvrx.launch`: run this node's share of a run from a Python program, with a command or a function for workers.

The agent is `nvrx-node join` in a process of its own: a program that calls this may hold threads, CUDA or a notebook.
Must not know: what an option means; all are checked by the agent itself.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from . import function_worker

log = logging.getLogger("nvrx.launch")

LOCAL = "localhost:0"
NUMA_VARIABLE = "NVRX_GPUS_PER_NUMA"
# The agent ends with this program, however that ends: by SIGTERM, so that workers get their grace.
_START = (
    "import signal; from nvrx.client.processes import set_parent_death_signal; "
    "set_parent_death_signal(signal.SIGTERM); from nvrx.client.cli import program; program()"
)


class LaunchFailed(Exception):
    """The run did not succeed. `exit_code`: that of `nvrx-node join`."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"nvrx-node join ended with exit code {exit_code}; its last lines say why")
        self.exit_code = exit_code


def launch(
    entry: Callable[..., Any] | Sequence[str], *args: Any, config: Mapping[str, Any] | None = None
) -> dict[int, Any]:
    """Join a run with this node, work until it ends, and return what the function returned on each rank of this node.

    `entry`: a command, whose `args` are appended as text; or a function, which each worker calls with `args` in a fresh
    interpreter (as multiprocessing's `spawn` does, so both must be picklable), not bound to NUMA nodes.
    `config`: options of `nvrx-node join` by name, such as `{"coordinator": "head:7700", "nnodes": "6:8",
    "nproc_per_node": 8}`; True for a flag, a list for an option that may be repeated. Without a coordinator one is
    started for this node alone.
    The answer is by global rank, of the last cycle; empty for a command.

    Raises LaunchFailed when the run did not succeed; TypeError, pickle.PicklingError for what cannot be handed over.
    """
    options = {"coordinator": LOCAL, **(config or {})}
    if not callable(entry):
        command = [entry] if isinstance(entry, str) else [os.fspath(one) for one in entry]
        _run(options, [*command, *map(str, args)], {})
        return {}
    if os.environ.get(NUMA_VARIABLE, "").strip():
        log.warning("a function is not bound to NUMA nodes: %s is not used; launch a command for that", NUMA_VARIABLE)
        options["numa_binding"] = "off"
    with tempfile.TemporaryDirectory(prefix="nvrx-launch-") as directory:
        file = Path(directory) / "function"
        file.write_bytes(_packed(entry, args))
        name = f"{entry.__module__}.{getattr(entry, '__qualname__', type(entry).__qualname__)}"
        command = [sys.executable, "-m", function_worker.__name__, name]
        _run(options, command, {function_worker.FILE: str(file)})
        return _results(file)


def _packed(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """What a fresh interpreter needs, in two steps: how to find this program's modules, then what is in them."""
    preparation = spawn.get_preparation_data("nvrx worker")
    preparation.pop("authkey", None)  # a secret of this program's own processes
    if function.__module__ == "__main__" and not _can_be_found(preparation):
        raise TypeError(f"{function.__qualname__} is defined in an interactive session; put it into a module")
    return pickle.dumps((preparation, pickle.dumps((function, tuple(args)))))


def _can_be_found(preparation: Mapping[str, Any]) -> bool:
    """Whether a fresh interpreter can import this program: a named module, or a file."""
    path = preparation.get("init_main_from_path")
    return "init_main_from_name" in preparation or (path is not None and Path(path).is_file())


def _results(file: Path) -> dict[int, Any]:
    """By rank, of the last cycle that any worker of this node finished."""
    found = [function_worker.read_result(path) for path in file.parent.glob(f"{file.name}.*")]
    last = max((one.cycle for one in found), default=0)
    return {one.rank: one.value for one in sorted(found, key=lambda one: one.rank) if one.cycle == last}


def _run(options: Mapping[str, Any], command: Sequence[str], more: Mapping[str, str]) -> None:
    argv = [sys.executable, "-c", _START, "join", *_words(options), "--", *command]
    # In a group of its own: a Ctrl-C is for this program, which passes it on.
    agent = subprocess.Popen(argv, env={**os.environ, **more}, process_group=0)
    interrupted: KeyboardInterrupt | None = None
    while True:
        try:
            code = agent.wait()
            break
        except KeyboardInterrupt as error:
            interrupted = error
            agent.send_signal(signal.SIGINT)
    if interrupted is not None:
        raise interrupted
    if code != 0:
        raise LaunchFailed(code if code > 0 else 128 - code)


def _words(options: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None or value is False:
            continue
        if value is True:
            words.append(flag)
        else:
            for one in value if isinstance(value, list | tuple) else [value]:
                words.append(f"{flag}={one}")
    return words
