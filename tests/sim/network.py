"""The network between nodes and the coordinator: two ways per node, each may stall, and streams break.

A stream is reliable and in order, as TCP is: what was sent comes in order, late, or the stream breaks and what was
under way is lost. Carries callbacks and knows no message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random

KEEPALIVE_S = 20.0
"""After that long without an answer both ends give a connection up: 10 s until a ping, 10 s for its answer."""
RETRANSMITTED_WITHIN_S = 4.0
USUAL_LATENCY_S = (0.0002, 0.003)

LATE_CANCEL = 0.5
"""How often a handler runs on for a moment after its caller's end is known."""

Arrive = Callable[[], None]


class Way:
    """One direction of a link. While it is blocked, what arrives is held, and after that for a retransmission more.

    Each connection is sent again by itself, so that of two the later may come first.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._blocks = 0
        self._held: dict[Pipe, deque[Arrive]] = {}

    @property
    def is_blocked(self) -> bool:
        return self._blocks > 0

    def pass_on(self, pipe: Pipe, arrive: Arrive) -> None:
        if self.is_blocked or pipe in self._held:
            self._held.setdefault(pipe, deque()).append(arrive)
        else:
            arrive()

    def block(self) -> None:
        self._blocks += 1

    def unblock(self) -> None:
        self._blocks -= 1
        if not self.is_blocked:
            for pipe in self._held:
                after_s = self._random.uniform(0.0, RETRANSMITTED_WITHIN_S)
                asyncio.get_running_loop().call_later(after_s, self._retransmit, pipe)

    def _retransmit(self, pipe: Pipe) -> None:
        if self.is_blocked:
            return
        for arrive in self._held.pop(pipe, ()):
            arrive()


class Link:
    """The way from one node to the coordinator (`up`) and back (`down`)."""

    def __init__(self, name: str, random: Random) -> None:
        self.name = name
        self.up = Way(random)
        self.down = Way(random)
        self.latency_s = USUAL_LATENCY_S
        self._random = random
        self.connections: list[Connection] = []
        self.answers_to_lose = 0

    @property
    def is_open(self) -> bool:
        return not (self.up.is_blocked or self.down.is_blocked)

    def delay_s(self) -> float:
        return self._random.uniform(*self.latency_s)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def block(self, ways: tuple[Way, ...], duration_s: float) -> None:
        """Stall some ways for a while; when it lasts, both ends give their connections up."""
        loop = asyncio.get_running_loop()
        for way in ways:
            way.block()
            loop.call_later(duration_s, way.unblock)
        if duration_s > KEEPALIVE_S:
            loop.call_later(KEEPALIVE_S, self.give_up, tuple(self.connections))

    def give_up(self, connections: tuple[Connection, ...]) -> None:
        """Keepalive: neither end hears the other of these any more."""
        for one in connections:
            if one in self.connections and not self.is_open:
                one.break_now("keepalive timeout")

    def break_all(self, why: str) -> None:
        for one in list(self.connections):
            one.break_now(why)


class Pipe:
    """One direction of one connection: in order, however long each part takes."""

    def __init__(self, link: Link, way: Way) -> None:
        self._link = link
        self._way = way
        self._last_due_s = 0.0
        self._under_way: deque[Arrive] = deque()

    def send(self, arrive: Arrive) -> None:
        loop = asyncio.get_running_loop()
        self._last_due_s = max(self._last_due_s, loop.time() + self._link.delay_s())
        self._under_way.append(arrive)
        loop.call_at(self._last_due_s, self._next)

    def _next(self) -> None:
        # The loop keeps no order between timers of one moment.
        self._way.pass_on(self, self._under_way.popleft())


class Connection:
    """What one call goes over. `on_broken` of either end is called once, with why; afterwards nothing arrives."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.is_broken = False
        self._up = Pipe(link, link.up)
        self._down = Pipe(link, link.down)
        self.on_broken_at_node: Callable[[str], None] | None = None
        self.on_broken_at_coordinator: Callable[[str], None] | None = None
        link.connections.append(self)

    def send_up(self, arrive: Arrive) -> None:
        self._up.send(lambda: self._arrive(arrive))

    def send_down(self, arrive: Arrive) -> None:
        self._down.send(lambda: self._arrive(arrive))

    def _arrive(self, arrive: Arrive) -> None:
        if not self.is_broken:
            arrive()

    def close(self) -> None:
        """The call is over at both ends."""
        self.is_broken = True
        if self in self.link.connections:
            self.link.connections.remove(self)

    def break_now(self, why: str) -> None:
        """Both ends learn it at once; what is under way is lost."""
        self.close()
        for tell in (self.on_broken_at_node, self.on_broken_at_coordinator):
            if tell is not None:
                tell(why)

    def break_from_node(self, why: str) -> None:
        """The node's end is gone: the coordinator learns it behind all that was sent, perhaps a moment later."""
        self.on_broken_at_node = None

        def arrive() -> None:
            self.close()
            if self.on_broken_at_coordinator is not None:
                after_s = self.link.delay_s() if self.link.chance(LATE_CANCEL) else 0.0
                asyncio.get_running_loop().call_later(after_s, self.on_broken_at_coordinator, why)

        self.send_up(arrive)

    def break_from_coordinator(self, why: str) -> None:
        """The coordinator's end is gone: the node learns it when the news arrives."""
        self.on_broken_at_coordinator = None

        def arrive() -> None:
            self.close()
            if self.on_broken_at_node is not None:
                self.on_broken_at_node(why)

        self.send_down(arrive)
