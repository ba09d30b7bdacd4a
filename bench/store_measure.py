"""What is measured of stores, kind by kind in turn: each figure a sample. Knows neither tables nor medians.

`python -m bench.store_measure KINDS REPS DIRECTORY` prints the samples of those whose names are answered late: in a
process of its own, because it enters a network of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import hostnames
from bench.store_load import OPERATIONS
from bench.store_servers import Generator, Server

CLIENTS = (1, 8, 64)
BURST = 4_000
CONNECTIONS = 10_000
AT_ONCE = 2_000
"""More would overflow the queue of those who wait to be accepted (net.core.somaxconn is 4096)."""
KEYS = 100_000
ANSWER_AFTER_S = 0.1
LATE_LIMIT_S = 5.0
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Sample:
    """`measure` is one of those that store_figures names."""

    kind: str
    rep: int
    measure: str
    value: float


def in_turn(kinds: Sequence[str], rep: int) -> Sequence[str]:
    """Each round begins with another kind, so that none always runs on what another left behind."""
    first = rep % len(kinds)
    return [*kinds[first:], *kinds[:first]]


def operations(kinds: Sequence[str], reps: int, seconds: float, directory: Path) -> Iterator[Sample]:
    """Rate and processor time of each operation."""
    servers = {kind: Server(kind, directory / f"{kind}-operations") for kind in kinds}
    generators = {kind: Generator(server, directory / "load.log") for kind, server in servers.items()}
    for rep in range(reps):
        for operation in OPERATIONS:
            for clients in CLIENTS:
                for kind in in_turn(kinds, rep):
                    done = generators[kind].do("operate", operation=operation, clients=clients, seconds=seconds)
                    name = f"{operation}/{clients}"
                    yield Sample(kind, rep, f"{name}/per_s", done.count / done.wall_s)
                    yield Sample(kind, rep, f"{name}/cpu_us", done.cpu_s / done.count * 1e6)
    _close(generators.values())
    _close(servers.values())


def bursts(kinds: Sequence[str], reps: int, directory: Path) -> Iterator[Sample]:
    """Thousands who connect at once, and then wait for one key."""
    servers = {kind: Server(kind, directory / f"{kind}-bursts") for kind in kinds}
    for rep in range(reps):
        for kind in in_turn(kinds, rep):
            generator = Generator(servers[kind], directory / "load.log")
            burst = generator.do("connect", connections=BURST, limit_s=_LIMIT_S)
            yield Sample(kind, rep, "burst/per_s", burst.count / burst.wall_s)
            yield Sample(kind, rep, "burst/cpu_us", burst.cpu_s / burst.count * 1e6)
            woken = generator.do("wake")
            yield Sample(kind, rep, "wake/ms", woken.wall_s * 1e3)
            yield Sample(kind, rep, "wake/cpu_us", woken.cpu_s / woken.count * 1e6)
            generator.close()
    _close(servers.values())


def memory(kinds: Sequence[str], reps: int, directory: Path) -> Iterator[Sample]:
    """Resident memory: empty, with connections, and with keys on top."""
    for rep in range(reps):
        for kind in in_turn(kinds, rep):
            server = Server(kind, directory / f"{kind}-memory-{rep}")
            generator = Generator(server, directory / "load.log")
            empty_mb = server.rss_mb()
            for _ in range(CONNECTIONS // AT_ONCE):
                generator.do("connect", connections=AT_ONCE, limit_s=_LIMIT_S)
            connected_mb = server.rss_mb()
            filled = generator.do("fill", keys=KEYS)
            filled_mb = server.rss_mb()
            _close([generator, server])
            yield Sample(kind, rep, "empty/mb", empty_mb)
            yield Sample(kind, rep, "connections/mb", connected_mb)
            yield Sample(kind, rep, "connection/kb", (connected_mb - empty_mb) / CONNECTIONS * 1e3)
            yield Sample(kind, rep, "key/bytes", (filled_mb - connected_mb) / filled.count * 1e6)


def late_names(kinds: Sequence[str], reps: int, directory: Path) -> Iterator[Sample]:
    """The burst where a resolver answers late; ends after LATE_LIMIT_S with those that were let in."""
    hostnames.use_late_resolver(directory, ANSWER_AFTER_S)
    for rep in range(reps):
        for kind in in_turn(kinds, rep):
            server = Server(kind, directory / f"{kind}-late-{rep}")
            generator = Generator(server, directory / "load.log")
            burst = generator.do("connect", connections=BURST, limit_s=LATE_LIMIT_S)
            yield Sample(kind, rep, "late/per_s", burst.count / burst.wall_s)
            _close([generator, server])


def _close(ended: Iterable[Server | Generator]) -> None:
    for one in ended:
        one.close()


def main() -> None:
    kinds, reps, directory = sys.argv[1:]
    for sample in late_names(kinds.split(","), int(reps), Path(directory)):
        print(json.dumps(asdict(sample)), flush=True)


if __name__ == "__main__":
    main()
