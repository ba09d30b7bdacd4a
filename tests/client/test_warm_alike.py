"""A forked worker is what a fresh one would be: the same command is run cold and warm, and must say the same."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from .supervision import Bench
from .warmth import cold_and_warm, cold_and_warm_in_pipes, python, spec

pytestmark = pytest.mark.rule("G10", "G3")
EVERYTHING = Path(__file__).with_name("everything.py")


def _lay_out(bench: Bench) -> None:
    package, folder = bench.folder / "package", bench.folder / "folder"
    package.mkdir()
    folder.mkdir()
    (package / "__init__.py").write_text("")
    shutil.copy(EVERYTHING, package / "every.py")
    shutil.copy(EVERYTHING, bench.folder / "every.py")
    (folder / "link.py").symlink_to("../every.py")


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (["every.py", "a b", "", "--x", "\udcff"], {}),
        (["./folder/link.py"], {}),
        (["-u", "{folder}/every.py", "-u"], {}),
        (["-m", "package.every", "1", "-m"], {}),
        (["-OBum", "package.every"], {}),
        (["-I", "every.py"], {}),
        (["-Es", "-W", "error", "-Xutf8", "-Xdev", "every.py", "long" * 100], {}),
        (["-X", "faulthandler", "-b", "every.py"], {"LC_ALL": "C", "PYTHONPATH": "/no/such"}),
        (["-OO", "-S", "every.py"], {"PYTHONHASHSEED": "7", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}),
    ],
    ids=lambda value: " ".join(value)[:40].encode("ascii", "replace").decode() if isinstance(value, list) else "",
)
async def test_a_warm_worker_sees_what_a_cold_one_sees(
    bench: Bench, arguments: list[str], env: Mapping[str, str]
) -> None:
    """Words, names, paths, flags, environment, signals, descriptors, streams, limits: all of everything.py."""
    _lay_out(bench)
    argv = [sys.executable, *(word.format(folder=bench.folder) for word in arguments)]
    cold, warm = await cold_and_warm(bench, spec(bench, argv, env=env))
    assert cold.end == "exit code 0"
    assert '"argv"' in cold.out
    assert cold.out.endswith("at exit\n")
    assert warm == cold


@pytest.mark.rule("G8")
@pytest.mark.parametrize("unbuffered", ["", "1"])
async def test_a_warm_worker_whose_output_a_log_process_takes_is_like_a_cold_one(bench: Bench, unbuffered: str) -> None:
    """Its streams are pipes, in which nobody can seek; those of the zygote are not."""
    _lay_out(bench)
    worker = spec(bench, [sys.executable, "every.py"], env={"PYTHONUNBUFFERED": unbuffered})
    cold, warm = await cold_and_warm_in_pipes(bench, worker)
    assert cold.end == "exit code 0"
    assert cold.out.endswith("at exit\n")
    assert warm == cold


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("print('no end of line', end='')", "exit code 0"),
        ("import sys; sys.exit(37)", "exit code 37"),
        ("import sys; sys.exit()", "exit code 0"),
        ("import sys; sys.exit('a reason')", "exit code 1"),
        ("raise SystemExit(-1)", "exit code 255"),
        ("import os; print('lost'); os._exit(9)", "exit code 9"),
        ("def f():\n    return 1 / 0\n\nf()", "exit code 1"),
        ("try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('é') from e", "exit code 1"),
        ("try:\n    {}['a']\nexcept KeyError:\n    raise ValueError('second')", "exit code 1"),
        ("raise ExceptionGroup('group', [ValueError(1), TypeError(2)])", "exit code 1"),
        ("raise KeyboardInterrupt", "SIGINT"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(60)", "SIGINT"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)\nimport time; time.sleep(60)", "SIGTERM"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import ctypes, resource; resource.setrlimit(4, (0, 0)); ctypes.string_at(0)", "SIGSEGV"),
        ("import os, resource; resource.setrlimit(4, (0, 0)); os.abort()", "SIGABRT"),
        ("def f(:\n", "exit code 1"),
        ("# coding: latin-1\nprint('\\xe9', ascii('é'))", "exit code 0"),
        ("\ufeffprint('mark')", "exit code 0"),
        ("import sys\nsys.excepthook = lambda *a: print('hook', a[0], a[2].tb_frame.f_lineno)\n1 / 0", "exit code 1"),
        ("import warnings\nwarnings.warn('twice')\nwarnings.warn('twice')", "exit code 0"),
        ("import atexit\natexit.register(lambda: 1 / 0)\nprint('x')", "exit code 0"),
        ("import sys; sys.stdout.close()", "exit code 0"),
        ("import os; os.close(1); print('lost')", "exit code 1"),
        (
            "import threading, time\n"
            "main = threading.main_thread()\n"
            "def late():\n    main.join()\n    print('late', threading.current_thread().name)\n    1 / 0\n"
            "threading.Thread(target=late).start()",
            "exit code 0",
        ),
        ("import logging; logging.basicConfig(); logging.error('%s', __name__, stack_info=False)", "exit code 0"),
        ("import traceback\ntry:\n    1 / 0\nexcept Exception:\n    traceback.print_exc()", "exit code 0"),
        ("import faulthandler; faulthandler.enable(); import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import inspect\ndef f(): pass\nprint(inspect.getsource(f), inspect.getfile(f))", "exit code 0"),
        ("x: int = 1\nprint(__annotations__, sorted(globals()))", "exit code 0"),
        (
            "import sys\nprint(sys.argv)\nclass E(Exception): pass\nE.__module__ = 'builtins'\nraise E(*sys.argv)",
            "exit code 1",
        ),
        (
            "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('forked', pid == 0, flush=True)",
            "exit code 0",
        ),
        (
            "import subprocess; subprocess.run(['sh', '-c', 'echo out; echo err >&2; ulimit -n']).check_returncode()",
            "exit code 0",
        ),
        ("import runpy; print(runpy.run_module('this.is.nothing'))", "exit code 1"),
    ],
    ids=range(34),
)
async def test_a_warm_worker_ends_as_a_cold_one(bench: Bench, code: str, end: str) -> None:
    """Exit codes, signals, tracebacks, exit handlers, threads that go on, what is still to be flushed."""
    cold, warm = await cold_and_warm(bench, python(bench, code))
    assert cold.end == end
    assert warm == cold


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
async def test_multiprocessing_finds_the_main_module(bench: Bench, method: str) -> None:
    """As PyTorch's DataLoader: classes and functions of __main__ go to processes that import it anew."""
    code = f"""
import multiprocessing
class Task:
    def __init__(self, number): self.number = number
def double(task): return Task(2 * task.number)
if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        print([task.number for task in pool.map(double, [Task(1), Task(2)])])
"""
    cold, warm = await cold_and_warm(bench, python(bench, code))
    assert cold.out == "[2, 4]\n"
    assert warm == cold


@pytest.mark.parametrize(
    "arguments",
    [["-m", "no.such.module"], ["-m", "package"], ["-m", "package.broken", "x"], ["-m", "json.tool", "/dev/null"]],
    ids=" ".join,
)
async def test_modules_fail_alike(bench: Bench, arguments: list[str]) -> None:
    _lay_out(bench)
    (bench.folder / "package" / "broken.py").write_text("def f():\n    raise ValueError(__spec__.name)\nf()\n")
    cold, warm = await cold_and_warm(bench, spec(bench, [sys.executable, *arguments]))
    assert cold.end == "exit code 1"
    assert warm == cold


async def test_what_imports_write_is_in_the_output_of_each_worker(bench: Bench) -> None:
    (bench.folder / "chatty.py").write_text(
        "import sys, os, warnings\nprint('imported')\nos.write(2, b'raw\\n')\nwarnings.warn('old')\n"
    )
    cold, warm = await cold_and_warm(bench, python(bench, "import chatty\nprint('begun')"), ["chatty"])
    assert (cold.out, warm.out) == ("imported\nbegun\n", "imported\nbegun\n")
    assert sorted(warm.err.splitlines()) == sorted(cold.err.splitlines())


async def test_the_environment_that_imports_made_is_kept_and_what_differs_is_set(bench: Bench) -> None:
    (bench.folder / "sets.py").write_text("import os\nos.environ['MADE'] = 'by import'\ndel os.environ['GIVEN']\n")
    code = (
        "import sets, os, json; print(json.dumps(dict(os.environ), sort_keys=True)); os.system('env | sort | grep =')"
    )
    worker = python(bench, code)
    worker = spec(bench, worker.argv, env={"GIVEN": "a", "NVRX_EMPTY": "", "MASTER_ADDR": "é\udcff", "ODD": "b=c\nd"})
    cold, warm = await cold_and_warm(bench, worker, ["sets"])
    assert '"MADE": "by import"' in cold.out
    assert '"GIVEN"' not in cold.out
    assert warm == cold


async def test_standard_streams_that_modules_hold_are_the_workers_own(bench: Bench) -> None:
    """As a logging handler made while a module is imported."""
    (bench.folder / "holds.py").write_text("import sys\nout, err = sys.stdout, sys.stderr\n")
    code = """
import os, sys, holds
assert holds.out is sys.stdout and holds.err is sys.stderr
holds.out.write('held ')
sys.stdout.write('own ')
holds.err.write('at once\\n')
print(sys.stdout.tell(), os.fstat(1).st_size, sys.stdout.buffer.raw.seekable())
"""
    cold, warm = await cold_and_warm(bench, python(bench, code), ["holds"])
    assert cold.out.startswith("held own ")
    assert warm == cold


@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="there is no other Python here")
async def test_another_python_than_the_agents_is_warmed_too(bench: Bench) -> None:
    """The command's own, which knows nothing of nvrx."""
    _lay_out(bench)
    cold, warm = await cold_and_warm(bench, spec(bench, ["/usr/bin/python3", "-I", "every.py"]))
    assert cold.end == "exit code 0"
    assert warm == cold
