"""A thread with an event loop in which this node's membership lives, while torch's agent keeps the main thread busy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from .config import NodeConfig
from .coordinator import Coordinator
from .torchrun_agent import TorchrunAgent
from .torchrun_seat import Parting, Seat

PARTING_WITHIN_S = 10.0
"""How long the end of torch's agent waits for this node to have left: an absent coordinator must not hold it up."""
_GRPC = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}
"""gRPC's lines are not for our users. Its fork handlers would guard nothing: torch's agent starts workers by exec."""


@contextlib.contextmanager
def grpc_environment() -> Iterator[None]:
    """gRPC reads its variables when it is first used; the workers, who inherit ours, are not to see these."""
    before = {name: os.environ.get(name) for name in _GRPC}
    os.environ.update({name: value for name, value in _GRPC.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class MembershipThread:
    """Joins as soon as it is started. `seat` is what torch's side waits on."""

    def __init__(self, config: NodeConfig, seat: Seat, version: str) -> None:
        self._config = config
        self._seat = seat
        self._version = version
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._agent: TorchrunAgent | None = None
        self._thread = threading.Thread(target=self._run, name="nvrx", daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._live())

    async def _live(self) -> None:
        coordinator = Coordinator(self._config.options.coordinators, self._config.options.token)
        self._agent = TorchrunAgent(self._config, coordinator, self._seat, self._version)
        self._ready.set()
        try:
            await self._agent.run()
        finally:
            await coordinator.close()

    def post(self, tell: Callable[[TorchrunAgent], None]) -> None:
        """Have the membership hear of something; returns at once. May be called by a signal's handler."""
        agent = self._agent
        assert agent is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all that could be told
            self._loop.call_soon_threadsafe(tell, agent)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def part(self, parting: Parting) -> None:
        """Have this node leave in order, if that takes no time; the thread ends."""
        self.post(lambda agent: agent.part(parting))
        self._thread.join(PARTING_WITHIN_S)
