"""Transcripts: commands to the driver's world, each with what it answers written below it.

A line that begins with `> ` is a command, an indented line is an answer, `#` begins a comment. `rewrite` gives the
same text with the answers that the core gives now.

    run MIN:MAX xWORKERS [setting=value ...]     nodes of a run with these settings, none there yet
    join NAME[:PROCID] ...                       nodes join and connect          rejoin: as new incarnations
    reopen NAME ...                              the first opens the run's next life
    running [NAME ...]                           active nodes report their workers started
    exit NAME/LOCAL[@CYCLE] CODE|SIGNAL          a worker ends                   finish NAME ...: all exit 0
    kill NAME ...                                agents die, streams break       freeze NAME ...: only silent
    leave NAME [stopped]                         an agent takes its node out; `stopped`: its workers are gone
    back NAME ...                                streams open again              restart-coordinator
    stopped NAME ...                             agents have stopped all that still ran
    promote NAME [for NAME] [now]                an operator's wish              drain NAME [now], undrain NAME, stop
    advance SECONDS                              time passes                     show: status and rank map
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nvrx.core.commands import Drain, Promote, StopRun, Undrain
from nvrx.core.ids import CycleNumber, LocalRank, NodeId, first_rank, global_rank
from nvrx.core.narrate import tell
from nvrx.core.ranks import Action, mapped_nodes, node_state
from nvrx.core.refused import Refused
from nvrx.core.run import Cycle
from nvrx.core.shape import SettingsWish, parse_nnodes
from nvrx.core.topology import OrderSource

from .driver import World, ended

COMMAND = "> "
ANSWER = "    "


def rewrite(text: str) -> str:
    """A transcript with the answers that the core gives now."""
    teller = Teller()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(ANSWER):
            continue
        lines.append(line)
        if line.startswith(COMMAND):
            lines += [f"{ANSWER}{one}" for one in teller.do(line.removeprefix(COMMAND))]
    return "\n".join(lines) + "\n"


def _setting(text: str) -> dict[str, float]:
    name, _, value = text.partition("=")
    return {name: float(value) if name.endswith("_s") else int(value)}


class Teller:
    """Does commands and says what came of them."""

    def __init__(self) -> None:
        self.world = World(1, 1)
        self._commands: dict[str, Callable[..., object]] = {
            "run": self._run,
            "join": self._join,
            "rejoin": lambda *names: self.world.rejoin(*names),
            "reopen": self._reopen,
            "running": lambda *names: self.world.start(*names),
            "exit": self._exit,
            "finish": lambda *names: self.world.finish(*names),
            "kill": lambda *names: self.world.kill(*names),
            "freeze": lambda *names: self.world.freeze(*names),
            "leave": lambda name, *stopped: self.world.leave(name, stopped=bool(stopped)),
            "back": self._back,
            "promote": self._promote,
            "stopped": lambda *names: self.world.stopped(*names),
            "drain": lambda name, *now: self.world.submit(Drain(NodeId(name), "now" in now)),
            "undrain": lambda name: self.world.submit(Undrain(NodeId(name))),
            "stop": lambda: self.world.submit(StopRun()),
            "restart-coordinator": lambda: self.world.restart_coordinator(),
            "advance": lambda seconds: self.world.advance(float(seconds.removesuffix("s"))),
        }

    def do(self, line: str) -> list[str]:
        """The answer to one command: the facts that followed, or the refusal."""
        name, *words = line.split()
        if name == "show":
            return list(self._show())
        seen = len(self.world.facts)
        refusal: list[str] = []
        try:
            self._commands[name](*words)
        except Refused as refused:
            refusal = [f"refused {refused.reason.value}: {refused.message}"]
        return [f"{fact.at:.1f} {tell(fact)}" for fact in self.world.facts[seen:]] + refusal

    def _run(self, nnodes: str, workers: str, *given: str) -> None:
        counts = parse_nnodes(nnodes)
        settings: dict[str, float] = {}
        for one in given:
            settings |= _setting(one)
        wish = SettingsWish(**settings)  # type: ignore[arg-type]
        self.world = World(counts.min_nodes, counts.max_nodes, int(workers.removeprefix("x")), wish)

    def _join(self, *names: str) -> None:
        for text in names:
            name, _, procid = text.partition(":")
            self.world.node(name, {OrderSource.PROCID: procid} if procid else {})
            self.world.join(name)

    def _reopen(self, first: str, *others: str) -> None:
        self.world.rejoin(first, reopen=True)
        self.world.rejoin(*others)

    def _exit(self, worker: str, how: str) -> None:
        name, _, rest = worker.partition("/")
        local_rank, _, cycle = rest.partition("@")
        one = ended(int(local_rank), int(how)) if how.isdigit() else ended(int(local_rank), signal=how)
        self.world.report(name, [one], CycleNumber(int(cycle)) if cycle else None)

    def _promote(self, name: str, *words: str) -> None:
        replace = NodeId(words[words.index("for") + 1]) if "for" in words else None
        self.world.submit(Promote(NodeId(name), replace, "now" in words))

    def _back(self, *names: str) -> None:
        for name in names:
            self.world.connect(name)
        self.world.tick()

    def _show(self) -> Iterator[str]:
        run = self.world.run
        states = {name: node_state(run, member).value.lower() for name, member in run.members.items()}
        yield ", ".join(f"{name} {state}" for name, state in sorted(states.items()))
        if not run.is_open:
            yield f"closed {run.state.value}, agents exit {run.exit_code}: {run.close_reason}"
        elif not self.world.is_training:
            yield f"waiting: {self.world.waiting()}"
        for name in sorted(states):
            if run.live(name) is not None and self.world.desired(name).action in {Action.STOP, Action.EXIT}:
                yield f"{name} is told to {self.world.desired(name).action.value}"
        for cycle in run.cycles:
            yield from self._rank_map(cycle)

    def _rank_map(self, cycle: Cycle) -> Iterator[str]:
        run = self.world.run
        per_node = run.shape.workers_per_node
        where = f" at {cycle.master.address}:{cycle.master.port}" if cycle.master is not None else ""
        yield f"cycle {cycle.number} {cycle.state.value}{where}"
        for row in mapped_nodes(run, cycle):
            last = global_rank(row.group_rank, LocalRank(per_node - 1), per_node)
            ended = f", {row.state.value}" if row.state is not None else ""
            yield f"  ranks {first_rank(row.group_rank, per_node)}-{last}: {row.node.node_id}{ended}"
        for standby in cycle.standbys:
            yield f"  standby {standby.node.node_id}: {standby.reason}"
        if cycle.failure is not None:
            at_fault = f" by {cycle.failure.node_id}" if cycle.failure.node_id is not None else ""
            also = f", then {len(cycle.consequences)} more" if cycle.consequences else ""
            yield f"  ended{at_fault}: {cycle.failure.cause.value}{also}"
