"""`make demo`: a small real training loses a worker, then a whole node, and ends as if nothing had been.

Starts a coordinator and three agents on this machine, kills for real, and checks what it shows. Exits 0 if every
check held, 1 with the reason and the logs if one did not. Nothing it started outlives it.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.text import Text

from bench import hostnames, processes
from examples.demo_cluster import WORKERS_PER_NODE, Cluster, DemoFailed, Step, Training
from nvrx.v1 import common_pb2, run_pb2

NODES = ("node-a", "node-b", "node-c")
WORLD_SIZE = 2 * WORKERS_PER_NODE
VICTIM_NODE, VICTIM_RANK = "node-b", 3
LOST_NODE, STANDBY = "node-a", "node-c"
PATIENCE_S = 60.0
ORPHANS_GONE_WITHIN_S = 5.0
ENDS_WITHIN_S = 10.0
SAME_LOSS = 1e-4
NEAR_LOSS = 0.95
LEAST_STEPS = 80
LEAST_BETWEEN_CHECKPOINTS = 10
LOSS_LINES = 10
"""How often the loss is shown on the way."""
# Shown as they happen; the others are in the journal (`nvrx-coord events`).
_TOLD = ("NodeJoined", "NodeLost", "WorldChosen", "CycleRunning", "CycleEnded", "CauseRevised", "RunClosed")


class Screen:
    """Plain lines with the seconds since the start; colour only on a terminal."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._began_s = time.monotonic()

    def _line(self, text: str, style: str) -> None:
        self._console.print(Text(f"{time.monotonic() - self._began_s:6.1f} s  {text}", style))

    def act(self, text: str) -> None:
        self._console.print()
        self._line(text, "bold cyan")

    def say(self, text: str) -> None:
        self._line(f"  {text}", "")

    def fact(self, text: str) -> None:
        self._line(f"  coordinator: {text}", "dim")

    def held(self, text: str) -> None:
        self._line(f"  ok: {text}", "green")

    def failed(self, text: str) -> None:
        self._console.print(Text(f"DEMO FAILED: {text}", "bold red"))

    def plain(self, text: str = "") -> None:
        self._console.print(Text(text))


class Demo:
    """The story, act by act."""

    def __init__(self, directory: Path, training: Training, screen: Screen) -> None:
        self._screen = screen
        self._steps = training.steps
        self._checkpoint_every = training.checkpoint_every
        self._shown_step = 0
        self._killed_s: dict[int, float] = {}
        self._allowed_ends = {2: "succeeded"}
        self.cluster = Cluster(directory, training, self._on_fact)

    def run(self) -> None:
        """Raises DemoFailed at the first check that does not hold."""
        self._start()
        self._lose_a_worker()
        self._lose_a_node()
        self._finish()

    # ---- the acts -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        screen, cluster = self._screen, self.cluster
        screen.act("1. Start: a coordinator and three agents; 2 nodes train, 1 stands by (--nnodes 2:3)")
        cluster.start_coordinator()
        screen.say(f"coordinator listens on {cluster.address}, its journal is in SQLite")
        for node_id in NODES:
            cluster.start_agent(node_id)
        screen.say(f"agents of {', '.join(NODES)} start; each active node runs {WORKERS_PER_NODE} workers")
        self._wait("cycle 0 to run", lambda: cluster.fact("CycleRunning", 0) is not None)
        screen.say("the workers import torch and meet; that takes a few seconds")
        self._wait_for_step(0, 1)
        self._check(self._world_of(0) == ["node-a", "node-b"], "node-a and node-b train, node-c stands by")

    def _lose_a_worker(self) -> None:
        screen, cluster = self._screen, self.cluster
        kill_from = self._wait_past_checkpoint(0, 0.3)
        screen.act(f"2. SIGKILL to one worker: rank {VICTIM_RANK} on {VICTIM_NODE}, after step {kill_from.step}")
        pids_before = {node_id: cluster.agent_pid(node_id) for node_id in NODES}
        self._allowed_ends[0] = "worker failed"
        self._killed_s[0] = time.monotonic()
        pid = cluster.kill_worker(VICTIM_NODE, VICTIM_RANK)
        screen.say(f"process {pid} is dead; gradients can no longer be summed, so all workers start again")
        resumed = self._wait_until_trained(1, after=0)
        self._check_resumed(0, resumed)
        failure = cluster.rank_map(0).failure
        self._check(
            failure.cause == common_pb2.CAUSE_WORKER_FAILED
            and (failure.node_id, failure.rank, failure.signal) == (VICTIM_NODE, VICTIM_RANK, "SIGKILL"),
            f"the record names the first cause: rank {VICTIM_RANK} on {VICTIM_NODE}, SIGKILL",
        )
        self._check(self._world_of(1) == self._world_of(0), "same nodes, same ranks, same agents; node-c still waits")
        self._check(
            all(one.pid == pids_before[one.node_id] for one in cluster.nodes()), "no agent had to be started again"
        )

    def _lose_a_node(self) -> None:
        screen, cluster = self._screen, self.cluster
        kill_from = self._wait_past_checkpoint(1, 0.65)
        screen.act(f"3. SIGKILL to a whole agent: {LOST_NODE}, the node of rank 0, after step {kill_from.step}")
        self._allowed_ends[1] = "node lost"
        self._killed_s[1] = time.monotonic()
        took_s = cluster.kill_agent(LOST_NODE, ORPHANS_GONE_WITHIN_S)
        self._check(True, f"its workers died with it, {took_s:.2f} s later: nobody trains on unsupervised")
        screen.say(f"{LOST_NODE} has 2 s to come back (--reconnect-grace); then {STANDBY} takes its place")
        screen.say(f"workers of {VICTIM_NODE} may fail first, for want of their peers: the record is put right then")
        resumed = self._wait_until_trained(2, after=1)
        self._check_resumed(1, resumed)
        failure = cluster.rank_map(1).failure
        self._check(
            failure.cause == common_pb2.CAUSE_NODE_LOST and failure.node_id == LOST_NODE,
            f"the record names the first cause: {LOST_NODE} lost, not the workers that failed because of it",
        )
        self._check(self._world_of(2) == ["node-b", "node-c"], f"{STANDBY} was promoted, the world is whole again")

    def _finish(self) -> None:
        screen, cluster = self._screen, self.cluster
        screen.act(f"4. Let it finish: {self._steps} steps")
        self._wait("the run to close", lambda: cluster.closed() is not None)
        for node_id in (VICTIM_NODE, STANDBY):
            code = cluster.agent_exit(node_id, ENDS_WITHIN_S)
            self._check(code == 0, f"the agent of {node_id} exited 0", f"the agent of {node_id} ended with {code}")
        state = cluster.run_state()
        self._check(state == common_pb2.RUN_STATE_SUCCEEDED, "the run SUCCEEDED")
        self._check_history()
        causes = [(one.cycle, one.cause) for one in cluster.cycles()]
        wanted = [common_pb2.CAUSE_WORKER_FAILED, common_pb2.CAUSE_NODE_LOST, common_pb2.CAUSE_SUCCEEDED]
        self._check(
            causes == list(enumerate(wanted)),
            "three cycles: worker failed, node lost, succeeded",
            f"three cycles were to be, with causes {wanted}; there are {causes}",
        )
        self._show_maps()
        code = cluster.stop_coordinator(ENDS_WITHIN_S)
        self._check(code == 0, "the coordinator ended as asked", f"the coordinator ended with {code}")

    # ---- waiting ------------------------------------------------------------------------------------------

    def _wait(self, what: str, is_there: Callable[[], bool]) -> None:
        def shown() -> bool:
            self._show_loss()
            return is_there()

        self.cluster.wait(what, shown, PATIENCE_S)

    def _wait_for_step(self, cycle: int, count: int) -> Step:
        self._wait(f"the steps of cycle {cycle}", lambda: len(self.cluster.steps_of(cycle)) >= count)
        return self.cluster.steps_of(cycle)[count - 1]

    def _wait_past_checkpoint(self, cycle: int, part: float) -> Step:
        """The latest step, once `part` of training is done and some steps lie after the newest checkpoint."""
        every = self._checkpoint_every
        first_s = max(1, every // 4)

        def past() -> bool:
            done = self.cluster.steps_of(cycle)
            here = done[-1].step if done else 0
            return here >= part * self._steps and here > every and first_s <= here % every <= every // 2

        self._wait(f"cycle {cycle} to train past a checkpoint", past)
        if not list(self.cluster.checkpoints.glob("step-*.pt")):
            raise DemoFailed(f"no checkpoint after {self.cluster.history[-1].step} steps")
        return self.cluster.history[-1]

    def _wait_until_trained(self, cycle: int, *, after: int) -> Step:
        """The first step of a cycle."""
        self._wait(f"cycle {cycle} to run", lambda: self.cluster.fact("CycleRunning", cycle) is not None)
        first = self._wait_for_step(cycle, 1)
        took_s = time.monotonic() - self._killed_s[after]
        self._screen.say(f"training goes on with step {first.step}, {took_s:.1f} s after the kill")
        return first

    def _on_fact(self, fact: run_pb2.Fact) -> None:
        if fact.kind in _TOLD:
            self._screen.fact(fact.text)
        if fact.kind == "CycleEnded" and fact.cycle not in self._allowed_ends:
            raise DemoFailed(f"cycle {fact.cycle} ended although nothing had been killed: {fact.text}")
        if fact.kind == "RunClosed" and len(self._killed_s) < 2:
            raise DemoFailed(f"the run closed too early: {fact.text}")

    def _show_loss(self) -> None:
        every = max(1, self._steps // LOSS_LINES)
        for one in self.cluster.history[self._shown_step :]:
            if one.step % every == 0 or one.step == self._steps:
                checkpoint = ", checkpoint" if one.step % self._checkpoint_every == 0 else ""
                self._screen.say(f"step {one.step:4d}  loss {one.loss:.4f}{checkpoint}")
        self._shown_step = len(self.cluster.history)

    # ---- checks -------------------------------------------------------------------------------------------

    def _check(self, holds: bool, text: str, otherwise: str = "") -> None:
        if not holds:
            raise DemoFailed(otherwise or f"this does not hold: {text}")
        self._screen.held(text)

    def _world_of(self, cycle: int) -> list[str]:
        """The nodes of a cycle, in order of group rank."""
        return [one.node_id for one in self.cluster.rank_map(cycle).nodes]

    def _check_resumed(self, before: int, first: Step) -> None:
        """Training went on from a checkpoint, with the loss that the cycle before had had there."""
        from_step = first.step - 1
        earlier = self.cluster.steps_of(before)
        self._check(
            from_step > 0 and from_step % self._checkpoint_every == 0 and from_step <= earlier[-1].step,
            f"resumed from the checkpoint of step {from_step}; {earlier[-1].step - from_step} steps are done again",
            f"cycle {before + 1} began with step {first.step}, which no checkpoint leads to",
        )
        same = next((one for one in earlier if one.step == first.step), None)
        if same is None:  # the checkpoint was its last deed
            self._check(
                first.loss < NEAR_LOSS * self.cluster.history[0].loss,
                f"loss goes on: {earlier[-1].loss:.4f} at step {from_step}, {first.loss:.4f} at step {first.step}",
            )
            return
        self._check(
            abs(same.loss - first.loss) <= SAME_LOSS,
            f"loss of step {first.step}: {same.loss:.4f} in cycle {before}, {first.loss:.4f} in cycle {before + 1}",
            f"loss of step {first.step} was {same.loss:.4f} in cycle {before}, and is {first.loss:.4f} after it",
        )

    def _check_history(self) -> None:
        history = self.cluster.history
        sizes = sorted({one.world_size for one in history})
        self._check(sizes == [WORLD_SIZE], f"WORLD_SIZE was {WORLD_SIZE} in every step", f"WORLD_SIZE was {sizes}")
        first, last = history[0], history[-1]
        self._check(
            last.step == self._steps and last.loss < 0.8 * first.loss,
            f"loss went from {first.loss:.4f} to {last.loss:.4f} in {last.step} steps",
            f"loss {first.loss:.4f} at first, {last.loss:.4f} at step {last.step} of {self._steps}: no training",
        )

    # ---- the rank maps ------------------------------------------------------------------------------------

    def _show_maps(self) -> None:
        """Who was which rank in each cycle, side by side, and what moved in the last one."""
        maps = [self.cluster.rank_map(cycle) for cycle in range(3)]
        before_last = {node.node_id: place for place, node in enumerate(maps[-2].nodes)}
        rows = [["ranks", *(f"cycle {one.cycle}" for one in maps), "what moved last"]]
        for place, node in enumerate(maps[-1].nodes):
            ranks = f"{node.first_rank}-{node.first_rank + node.local_world_size - 1}"
            here = (one.nodes[place].node_id for one in maps)
            rows.append([ranks, *here, _moved(node.node_id, place, before_last)])
        rows.append(["standby", *(", ".join(one.node_id for one in each.standbys) or "none" for each in maps), ""])
        causes = (common_pb2.Cause.Name(one.failure.cause).removeprefix("CAUSE_") for one in maps)
        rows.append(["ended by", *(one.lower().replace("_", " ") for one in causes), ""])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        self._screen.act("Rank maps of the three cycles, from the coordinator's journal")
        for row in rows:
            self._screen.plain("    " + "   ".join(map(str.ljust, row, widths)).rstrip())
        self._screen.plain()


def _moved(node_id: str, place: int, before: dict[str, int]) -> str:
    if node_id not in before:
        return f"{node_id} came, it was the standby"
    return "" if before[node_id] == place else f"{node_id} had ranks from {before[node_id] * WORKERS_PER_NODE} on"


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default_script = Path(__file__).resolve().with_name("train_ddp.py")
    parser.add_argument("--steps", type=int, default=250, help="training steps, at least 80 (default %(default)s)")
    parser.add_argument("--step-time", type=float, default=0.06, metavar="S", help="pause per step (%(default)s)")
    parser.add_argument("--script", type=Path, default=default_script, help="another training script, for tests")
    parser.add_argument("--keep", action="store_true", help="keep the directory with logs, journal and checkpoints")
    options = parser.parse_args(argv)
    if options.steps < LEAST_STEPS:
        parser.error(f"--steps must be at least {LEAST_STEPS}: two kills need a checkpoint each before them")
    return options


def _fail(screen: Screen, demo: Demo, directory: Path, reason: str) -> None:
    for path, lines in demo.cluster.log_tails().items():
        screen.plain(f"\n--- the end of {path.relative_to(directory)}")
        for line in lines:
            screen.plain(f"    {line}")
    screen.plain()
    screen.failed(reason)
    screen.plain(f"logs, journal and checkpoints are kept in {directory}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    screen = Screen()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    directory = Path(tempfile.mkdtemp(prefix="nvrx-demo-"))
    # torch's store looks up the name of each peer; with a slow name server that would be most of what is seen here.
    names_problem = hostnames.use_files_only(directory)
    processes.become_subreaper()
    every = max(LEAST_BETWEEN_CHECKPOINTS, options.steps // 10)
    training = Training(options.script.resolve(), options.steps, options.step_time, every)
    demo = Demo(directory, training, screen)
    if names_problem:
        screen.say(f"host names are looked up as set up here ({names_problem}): a slow name server slows each start")
    code = 1
    try:
        demo.run()
        code = 0
    except DemoFailed as failed:
        _fail(screen, demo, directory, str(failed))
    except KeyboardInterrupt:
        screen.plain("\ninterrupted: ending everything that was started")
        code = 130
    finally:
        processes.kill_descendants()
        if code != 1 and not options.keep:
            shutil.rmtree(directory, ignore_errors=True)
    if code == 0:
        screen.held("the demonstration is over: every check held, everything it started has ended")
        if options.keep:
            screen.plain(f"kept in {directory}")
    return code


if __name__ == "__main__":
    sys.exit(main())
