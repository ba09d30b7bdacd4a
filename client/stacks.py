"""Where a hung worker hangs: the stacks of all its threads, from py-spy where there is one (rule G9).

A process of its own takes them, for a bounded time: a worker stuck in a driver may hold up whoever looks at it.
Must not know why they are wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

WITHIN_S = 8.0
ENDS_WITHIN_S = 1.0
LEAST_S = 0.5
"""Below, there is no time to try once more."""
MAX_BYTES = 256 * 1024
PROGRAM = "py-spy"


@dataclass(frozen=True)
class Stack:
    """What was found, or why nothing was: one of the two is empty."""

    text: str
    problem: str


def find_py_spy(env: Mapping[str, str]) -> str | None:
    """On PATH, or beside this Python."""
    beside = Path(sys.executable).parent
    return shutil.which(PROGRAM, path=env.get("PATH", os.defpath)) or shutil.which(PROGRAM, path=str(beside))


async def take_stack(program: str, pid: int, env: Mapping[str, str], within_s: float = WITHIN_S) -> Stack:
    """The stacks of the Python processes from `pid` down; without holding them up where they cannot be: a process that
    was stopped by a signal cannot be stopped once more."""
    until_s = time.monotonic() + within_s
    found = await _ask(program, ("dump", "--subprocesses", "--pid", str(pid)), env, within_s)
    left_s = until_s - time.monotonic()
    if found.text or left_s < LEAST_S:
        return found
    again = await _ask(program, ("dump", "--subprocesses", "--nonblocking", "--pid", str(pid)), env, left_s)
    return again if again.text else found


async def _ask(program: str, arguments: tuple[str, ...], env: Mapping[str, str], within_s: float) -> Stack:
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            *arguments,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return Stack("", f"{program}: {error.strerror}")
    try:
        async with asyncio.timeout(within_s):
            told, complaint = await process.communicate()
    except TimeoutError:
        return Stack("", f"{PROGRAM} found none within {within_s:g} s")
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # Not for ever: what is stuck in a driver's call survives SIGKILL.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ENDS_WITHIN_S):
                    await process.wait()
    text = told[:MAX_BYTES].decode("utf-8", "replace").strip()
    if process.returncode != 0 or not text:
        why = complaint[:MAX_BYTES].decode("utf-8", "replace").partition("Stack backtrace:")[0]  # of its own
        said = why.strip().splitlines()
        return Stack("", f"{PROGRAM}: {said[-1].strip() if said else f'exit code {process.returncode}'}")
    return Stack(text, "")


def append_stack(path: Path, about: str, stack: Stack) -> None:
    """At the end of a worker's log, whose last line may be unfinished. Raises OSError."""
    at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    body = stack.text or f"no stack: {stack.problem}"
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(f"\n==== nvrx {at}: {about}; its stack:\n{body}\n==== nvrx: end of the stack\n")
