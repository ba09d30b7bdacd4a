"""The coordinator's end of its store process: starts it, takes over one that lives, replaces one that died (rule I6).

Level-triggered: what each run needs is noted as its state is shown, and one task opens and closes ports until the store
process has just that. Knows the store's ports, not what is in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import nvrx
from nvrx.core.facts import Endpoint
from nvrx.core.ids import JournalId, RunId
from nvrx.core.presence import HostedStores
from nvrx.core.stores import hosted_ports, stores_in_use
from nvrx.runtime_dir import make_private
from nvrx.store.client import StoreClient, StoreGone

from ..hosted import Hosted
from .control import (
    MAX_LINE_BYTES,
    READY,
    Kind,
    Message,
    Paths,
    Record,
    read_message,
    read_record,
    within_limit,
    write_message,
)
from .elsewhere import Elsewhere
from .ports import PortRange

log = logging.getLogger("nvrx.coord")

OFFERED = 2
"""Ports that lie ready for each open run: the next cycle never waits for one to be opened."""
ANSWER_WITHIN_S = 5.0
READY_WITHIN_S = 60.0
"""torch's import takes seconds on a busy host."""
AGAIN_AFTER_S = 1.0
_REATTACH_TRIES = 3
_MAX_LOG_BYTES = 10 * 1024 * 1024
"""Of the store process's log when one is started: a longer one is put aside, and the one before that is lost."""
_KEY_LENGTH = 16
"""Of the journal's id, in file names: the path of a Unix socket has 107 characters at most."""
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from nvrx.server.store_host.process import main; sys.exit(main(sys.argv[1:]))"
)


class StoreNotStarted(Exception):
    """The store process could not be had; the message is one line."""


class _ProcessGone(Exception):
    """The store process ended, or does not answer."""


@dataclass(frozen=True)
class StoreConfig:
    """How to host stores. `address` is what workers are told; empty: where their node reaches the coordinator."""

    kind: Kind
    host: str
    address: str
    paths: Paths
    log_file: Path
    lasting_port: int = 0
    cycle_ports: PortRange | None = None
    is_one_of_several: bool = False
    """Cycles may have stores at other coordinators' addresses, which are not this one's to judge (rule E6)."""


@dataclass
class _Followed:
    """What one run needs: ports of cycles that may have workers, and a few that lie ready."""

    is_open: bool = True
    in_use: frozenset[int] = frozenset()
    elsewhere: frozenset[Endpoint] = frozenset()
    ready: list[int] = field(default_factory=list)
    told: HostedStores = field(default_factory=HostedStores)


class _Control:
    """A control connection: one question at a time, and notice of its end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_gone: Callable[[], None]) -> None:
        self._reader = reader
        self._writer = writer
        self._on_gone = on_gone
        self._answers: asyncio.Queue[Message | None] = asyncio.Queue()
        self.gone = asyncio.Event()
        self._reading = asyncio.create_task(self._read(), name="store control")

    async def _read(self) -> None:
        while (message := await read_message(self._reader)) is not None:
            self._answers.put_nowait(message)
        self._answers.put_nowait(None)
        self.gone.set()
        self._on_gone()

    async def ask(self, message: Message) -> Message:
        """Raises _ProcessGone."""
        if self.gone.is_set():
            raise _ProcessGone
        write_message(self._writer, message)
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                answer = await self._answers.get()
        except TimeoutError:
            answer = None
        if answer is None:
            raise _ProcessGone
        return answer

    async def close(self) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        self._writer.close()


class StoreHost:
    """The stores of all runs. `offer` tells a run what there is for it."""

    def __init__(self, config: StoreConfig, offer: Callable[[RunId, HostedStores], None]) -> None:
        self._config = config
        self._offer = offer
        self._runs: dict[RunId, _Followed] = {}
        self._changed = asyncio.Event()
        self._control: _Control | None = None
        self._record: Record | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._open: set[int] = set()
        self._problem = ""
        self._elsewhere = Elsewhere(self._tell_all)

    # ---- what runs need -----------------------------------------------------------------------------------

    def observe(self, hosted: Hosted) -> None:
        """Note what a run needs now."""
        run = hosted.run
        followed = self._runs.setdefault(run.run_id, _Followed())
        stores, given = stores_in_use(run, hosted.presence), hosted_ports(run)
        elsewhere = frozenset(one for one in stores if self._is_elsewhere(one))
        in_use = frozenset(one.port for one in stores - elsewhere)
        ready = [port for port in followed.ready if port not in given]
        seen = (followed.in_use, followed.elsewhere, followed.is_open, followed.ready)
        if (in_use, elsewhere, run.is_open, ready) == seen and followed.told.ports:
            return
        if elsewhere != followed.elsewhere:
            followed.elsewhere = elsewhere
            self._elsewhere.follow({one for run in self._runs.values() for one in run.elsewhere})
        followed.in_use, followed.is_open, followed.ready = in_use, run.is_open, ready
        if not in_use <= self._open | followed.told.lost:
            # A store died while its cycle was being written down: the workers may fail before another process is there.
            self._tell(run.run_id, followed)
        self._changed.set()

    def _is_elsewhere(self, store: Endpoint) -> bool:
        return self._config.is_one_of_several and store.address != self._config.address

    async def connect(self) -> StoreClient:
        """A new connection that may write all keys of the lasting store. Raises StoreGone."""
        try:
            reader, writer = await self._greet()
        except (_ProcessGone, OSError) as error:
            raise StoreGone("the store process is being restarted") from error
        try:
            write_message(writer, {"do": "store"})
            if await read_message(reader) is None:
                raise StoreGone("the store process ended")
            return await StoreClient.greet(reader, writer)
        except BaseException:  # also where the caller is cancelled: nobody else closes it
            writer.close()
            raise

    # ---- the process --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take over the store process of this journal, or start one. Raises StoreNotStarted."""
        try:
            make_private(str(self._config.paths.directory))
        except OSError as error:
            raise StoreNotStarted(
                f"run-time directory {self._config.paths.directory}: {error.strerror}; set XDG_RUNTIME_DIR to another"
            ) from error
        before = read_record(self._config.paths)
        if before is not None and await self._take_over(before):
            return
        port = self._config.lasting_port
        if port == 0 and before is not None and before.host == self._config.host:
            # It died while no coordinator was there: workers that run know the lasting store by its port.
            try:
                await self._launch(before.lasting_port)
            except StoreNotStarted as error:
                log.warning("the lasting store gets another port: %s", error)
            else:
                return
        await self._launch(port)

    async def _take_over(self, record: Record) -> bool:
        self._record = record
        try:
            await self._attach()
        except (_ProcessGone, OSError):
            self._record = None
            return False
        wanted_port = self._config.lasting_port or record.lasting_port
        if (record.kind, record.host, record.lasting_port) != (self._config.kind, self._config.host, wanted_port):
            log.info("the store process %d was started otherwise; it ends with its last client", record.pid)
            await self._end()
            return False
        ports = self._config.cycle_ports
        low, high = (ports.low, ports.high) if ports is not None else (None, None)
        try:
            await self._ask({"do": "range", "low": low, "high": high})
        except _ProcessGone:
            self._let_go()
            return False
        log.info("took over the store process %d with %d open ports", record.pid, len(self._open))
        return True

    async def _launch(self, lasting_port: int) -> None:
        config, paths = self._config, self._config.paths
        argv = [sys.executable, "-P", "-c", _BOOT, str(_import_root()), "--kind", config.kind, "--host", config.host]
        argv += ["--directory", str(paths.directory), "--key", paths.key, "--lasting-port", str(lasting_port)]
        if config.cycle_ports is not None:
            argv += ["--cycle-ports", str(config.cycle_ports.low), str(config.cycle_ports.high)]
        try:
            self._process = _spawn(argv, config.log_file)
            line = await asyncio.wait_for(asyncio.to_thread(_first_line, self._process), READY_WITHIN_S)
        except (OSError, TimeoutError) as error:
            self._kill()
            raise StoreNotStarted(f"cannot start the store process: {error or 'it does not get ready'}") from error
        if line != READY:
            self._kill()
            raise StoreNotStarted(
                line.removeprefix("failed ") or f"the store process ended; its log is {config.log_file}"
            )
        self._record = read_record(paths)
        try:
            await self._attach()
        except (_ProcessGone, OSError) as error:
            raise StoreNotStarted(f"the store process ended as it began; its log is {config.log_file}") from error
        assert self._record is not None
        log.info("store process %d started; its log is %s", self._record.pid, config.log_file)

    async def _attach(self) -> None:
        """Raises _ProcessGone or OSError."""
        reader, writer = await self._greet()
        control = _Control(reader, writer, self._lose_all)
        try:
            state = await control.ask({"do": "state"})
        except _ProcessGone:
            await control.close()
            raise
        self._control = control
        self._open = {int(port) for port in state["ports"]}

    def _let_go(self) -> None:
        self._control, self._record, self._open = None, None, set()

    async def _greet(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        record = self._record
        if record is None:
            raise _ProcessGone
        with within_limit(self._config.paths.socket) as path:
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)
        write_message(writer, {"do": "hello", "secret": record.secret})
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                answer = await read_message(reader)
            if answer is None:
                raise _ProcessGone
        except TimeoutError as error:
            writer.close()
            raise _ProcessGone from error
        except BaseException:  # also where the caller is cancelled: nobody else closes it
            writer.close()
            raise
        return reader, writer

    # ---- keeping it so ------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Until cancelled: have just those ports open that are needed, whatever happens to the process."""
        while True:
            try:
                await self._bring_up_to_date()
                await self._news()
            except _ProcessGone:
                await self._replace()

    async def _news(self) -> None:
        assert self._control is not None
        waiting = [asyncio.create_task(one.wait()) for one in (self._changed, self._control.gone)]
        try:
            await asyncio.wait(
                waiting,
                timeout=AGAIN_AFTER_S if self._problem else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for task in waiting:
                task.cancel()
        if self._control.gone.is_set():
            raise _ProcessGone

    async def _bring_up_to_date(self) -> None:
        self._changed.clear()
        for run_id, run in self._runs.items():
            if not run.is_open and run.ready:
                run.ready = []
                self._tell(run_id, run)  # before they are closed: a run that is opened again must not take one
        needed = {port for run in self._runs.values() for port in (*run.in_use, *run.ready)}
        surplus = self._open - needed
        if surplus:
            await self._ask({"do": "close", "ports": sorted(surplus)})
            self._open -= surplus
        for run_id, run in list(self._runs.items()):
            missing = OFFERED - len(run.ready) if run.is_open else 0
            if missing:
                run.ready += await self._open_ports(missing)
            self._tell(run_id, run)

    async def _open_ports(self, count: int) -> list[int]:
        answer = await self._ask({"do": "open", "count": count})
        if not answer.get("ok"):
            problem = str(answer.get("error"))
            if problem != self._problem:
                log.error("no port for the store of a cycle: %s", problem)
            self._problem = problem
            return []
        self._problem = ""
        ports = [int(port) for port in answer["ports"]]
        self._open.update(ports)
        return ports

    def _tell(self, run_id: RunId, run: _Followed) -> None:
        record = self._record
        stores = HostedStores(
            address=self._config.address,
            lasting_port=record.lasting_port if record is not None else None,
            ports=tuple(run.ready),
            lost=(run.in_use - self._open) | {one.port for one in run.elsewhere & self._elsewhere.lost},
            problem=self._problem,
        )
        if stores != run.told:
            run.told = stores
            self._offer(run_id, stores)

    async def _ask(self, message: Message) -> Message:
        if self._control is None:
            raise _ProcessGone
        return await self._control.ask(message)

    def _lose_all(self) -> None:
        """At once, before any worker that fails for want of its store is heard of."""
        self._open = set()
        self._problem = "the store process is being restarted"
        for run in self._runs.values():
            run.ready = []
        self._tell_all()

    def _tell_all(self) -> None:
        for run_id, run in self._runs.items():
            self._tell(run_id, run)

    async def _replace(self) -> None:
        """The process is gone, and its stores with it; or it did not answer, as after we were suspended ourselves."""
        before = self._record
        if self._control is not None:
            await self._control.close()
        if before is not None and await self._reattach(before):
            return
        log.error("the store process %s is gone, and the stores of its cycles", before.pid if before else "")
        self._control, self._record, self._process = None, None, None
        self._lose_all()
        port = self._config.lasting_port or (before.lasting_port if before is not None else 0)
        while True:
            try:
                # Workers that run know the lasting store by its port.
                await self._launch(port)
            except StoreNotStarted as error:
                log.error("%s; trying again in %g s", error, AGAIN_AFTER_S)
                port = self._config.lasting_port
                await asyncio.sleep(AGAIN_AFTER_S)
            else:
                self._problem = ""
                assert self._record is not None
                log.info("store process %d takes the place of %s", self._record.pid, before.pid if before else "none")
                return

    async def _reattach(self, before: Record) -> bool:
        for _ in range(_REATTACH_TRIES):
            try:
                await self._attach()
            except _ProcessGone:
                continue
            except OSError:  # nobody listens there any more
                return False
            self._problem = ""
            log.warning("the store process %d had not answered; it does now", before.pid)
            return True
        log.error("the store process %d does not answer; another takes its place", before.pid)
        return False

    def _kill(self) -> None:
        """Of a process that we started in vain: see its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None

    async def _end(self) -> None:
        with contextlib.suppress(_ProcessGone):
            await self._ask({"do": "end"})
        if self._control is not None:
            await self._control.close()
        self._let_go()

    async def close(self, *, is_deposed: bool = False) -> None:
        """The coordinator ends: the process goes on while a run is open or workers may need it, else it ends too.

        `is_deposed`: whether it ends is for the next leader to say, which may be on this host and have it already.
        """
        self._elsewhere.close()
        if is_deposed or any(run.in_use or run.is_open for run in self._runs.values()):
            if self._control is not None:
                await self._control.close()
        else:
            await self._end()


def _spawn(argv: list[str], log_file: Path) -> subprocess.Popen[bytes]:
    """With a log of its own: whoever reads our standard error must see its end when we end, not when this does."""
    if log_file.exists() and log_file.stat().st_size > _MAX_LOG_BYTES:
        log_file.replace(log_file.with_suffix(".1.log"))
    with log_file.open("ab") as errors:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )


def _first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode("utf-8", "replace").strip()


def _import_root() -> Path:
    """The directory that `nvrx` was imported from: the store process must be of the same version."""
    assert nvrx.__file__ is not None
    return Path(nvrx.__file__).parent.parent


def paths_for(directory: str, journal_id: JournalId) -> Paths:
    """The files of the store process that belongs to a journal."""
    return Paths(Path(directory), journal_id[:_KEY_LENGTH])
