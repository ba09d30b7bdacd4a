"""Which worker commands a zygote can become, read from their words; and which environments it can take on. Pure.

What is not understood for certain starts cold: a worker must never run otherwise than its command says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_PYTHON = re.compile(rb"python(\d+(\.\d+)?)?")
_PLAIN_OPTIONS = frozenset(b"bBEIOPqsSu")
_TAKES_A_WORD = frozenset(b"WX")
_X_OPTIONS = re.compile(
    rb"(dev|faulthandler|frozen_modules|no_debug_ranges|utf8|warn_default_encoding)(=.*)?"
    rb"|(tracemalloc|int_max_str_digits|pycache_prefix)(=.*)?",
    re.DOTALL,
)
_MODULE = re.compile(rb"[^\W\d]\w*(\.[^\W\d]\w*)*")

PER_WORKER = re.compile(
    rb"(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|NVRX_\w+"
    rb"|TORCHELASTIC_(RUN_ID|RESTART_COUNT|MAX_RESTARTS|USE_AGENT_STORE|ERROR_FILE)"
)
"""Names in which workers and cycles differ. No interpreter or library reads them while it is imported."""


@dataclass(frozen=True, slots=True)
class WarmCommand:
    """`python [options] script.py arguments` or `python [options] -m module arguments`.

    `words_before` stand before the script's or the module's name.
    """

    argv: tuple[bytes, ...]
    options: tuple[bytes, ...]
    kind: Literal["script", "module"]
    words_before: int

    @property
    def interpreter(self) -> bytes:
        return self.argv[0]


@dataclass(frozen=True, slots=True)
class NotWarm:
    reason: str


def read_command(argv: Sequence[bytes]) -> WarmCommand | NotWarm:
    words = tuple(argv)
    program = os.path.basename(words[0])
    if not _PYTHON.fullmatch(program):
        return NotWarm(f"{os.fsdecode(program)} is no python; only python [OPTIONS] script.py, or -m module, is warmed")
    options: list[bytes] = []
    at = 1
    while at < len(words) and words[at].startswith(b"-") and words[at] != b"-":
        word = words[at]
        at += 1
        for index in range(1, len(word)):
            letter, rest = word[index], word[index + 1 :]
            if letter in _PLAIN_OPTIONS:
                options.append(b"-" + bytes([letter]))
            elif letter in _TAKES_A_WORD and (rest or at < len(words)):
                value = rest or words[at]
                at += not rest
                if letter == ord("X") and not _X_OPTIONS.fullmatch(value):
                    return NotWarm(f"python's option -X {os.fsdecode(value)} is not one that a warm worker can have")
                options += [b"-" + bytes([letter]), value]
                break
            elif letter == ord("m") and not rest and at < len(words):
                if not _MODULE.fullmatch(words[at]):
                    return NotWarm(f"{os.fsdecode(words[at])} is no module's name")
                return WarmCommand(words, tuple(options), "module", at)
            else:
                return NotWarm(f"python's option {os.fsdecode(word)} is not one that a warm worker can have")
    if at == len(words) or not words[at].endswith(b".py"):
        return NotWarm("the command names no script.py and no -m module")
    return WarmCommand(words, tuple(options), "script", at)


def shared_environment(env: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """What all workers of all cycles have in common."""
    return {name: value for name, value in env.items() if not PER_WORKER.fullmatch(name)}


@dataclass(frozen=True, slots=True)
class EnvironmentChange:
    removed: tuple[bytes, ...]
    set: tuple[tuple[bytes, bytes], ...]


def environment_change(base: Mapping[bytes, bytes], wanted: Mapping[bytes, bytes]) -> EnvironmentChange | NotWarm:
    """From the environment that the zygote began with to a worker's."""
    changed = tuple((name, value) for name, value in wanted.items() if base.get(name) != value)
    removed = tuple(name for name in base if name not in wanted)
    for name in (*removed, *(name for name, _ in changed)):
        if not PER_WORKER.fullmatch(name):
            return NotWarm(f"{os.fsdecode(name)} has another value than when the warm process began")
    return EnvironmentChange(removed, changed)
