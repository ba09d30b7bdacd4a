"""A worker that tells all it can see of itself, as JSON: run warm and cold, it is to say the same."""

import atexit
import builtins
import contextlib
import gc
import json
import logging
import os
import pickle
import resource
import signal
import sys
import threading

CONSTANT: int = 1


class Pickled:
    """Pickled by name, as what DataLoader workers are sent."""


def _file(stream: object) -> list[object]:
    names = ("name", "mode", "encoding", "errors", "line_buffering", "write_through")
    settings = [getattr(stream, name) for name in names]
    buffer = stream.buffer  # type: ignore[attr-defined]
    raw = getattr(buffer, "raw", buffer)
    facts = [stream.isatty(), stream.seekable(), stream.fileno(), type(buffer).__name__]  # type: ignore[attr-defined]
    return [*settings, *facts, raw.name, raw.mode, raw.closefd]


def _fds() -> dict[str, str]:
    found = {}
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        with contextlib.suppress(OSError):  # the one that listed the folder
            found[str(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def _status(*names: str) -> dict[str, str]:
    with open("/proc/self/status") as file:
        lines = [line.partition(":") for line in file]
    return {name: value.strip() for name, _, value in lines if name in names}


def everything() -> dict[str, object]:
    main = sys.modules["__main__"]
    with open("/proc/self/cmdline", "rb") as file:
        command_line = file.read().decode("latin-1").rstrip("\0").split("\0")
    with open("/proc/self/comm") as file:
        name = file.read()
    return {
        "argv": sys.argv,
        "orig_argv": getattr(sys, "orig_argv", None),
        "command_line": command_line,
        "name": name,
        "path": sys.path,
        "prefix": [sys.prefix, sys.exec_prefix, sys.executable],
        "flags": repr(sys.flags),
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "main": [__name__, __file__, repr(__spec__), __package__, type(__loader__).__name__, __doc__],  # type: ignore[name-defined]
        "main_names": sorted(vars(main)),
        "main_is_this": vars(main) is globals()
        and main.Pickled is Pickled
        and __builtins__ in (builtins, vars(builtins)),
        "annotations": repr(globals().get("__annotations__")),
        "pickle": pickle.dumps(Pickled()).decode("latin-1"),
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "leads_group": os.getpid() == os.getpgid(0),
        "is_child_of": os.getppid(),
        "session": os.getsid(0),
        "umask": _status("Umask", "SigBlk", "SigIgn", "SigCgt", "SigPnd", "Threads"),
        "handlers": {number: repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())},
        "fds": _fds(),
        "stdout": _file(sys.stdout),
        "stderr": _file(sys.stderr),
        "stdin": [sys.stdin.name, sys.stdin.read()],
        "nice": os.nice(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "thread": [threading.current_thread() is threading.main_thread(), threading.active_count()],
        "thread_ids": [threading.get_native_id() == os.getpid(), threading.main_thread().native_id == os.getpid()],
        "gc": [gc.isenabled(), gc.get_threshold()],
        "recursion": [sys.getrecursionlimit(), sys.getswitchinterval()],
        "locale": [sys.getfilesystemencoding(), sys.getdefaultencoding()],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
        "logging": [logging.root.level, len(logging.root.handlers)],
        "times": sum(os.times()[:2]) < 60,
    }


if __name__ == "__main__":
    atexit.register(print, "at exit")
    json.dump(everything(), sys.stdout, indent=1, sort_keys=True)
    print()
    print("error", file=sys.stderr)
