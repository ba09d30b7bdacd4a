"""A run with all that can happen to one: a worker fails, a node is lost, a standby comes in."""

from __future__ import annotations

from dataclasses import dataclass

from .coordination import RUN_WORKERS, HandAgent, Served, exited, world


@dataclass
class Story:
    """Cycle 0 ended by a worker of n0, cycle 1 by the loss of n1, cycle 2 goes on with n0 and n2."""

    served: Served
    agents: list[HandAgent]


async def tell_story(served: Served) -> Story:
    """Lives through the story; the coordinator has to be QUICK."""
    agents = await world(served)
    stopped = [exited(one, None, signal="SIGTERM", by_agent=True) for one in range(2)]
    # The others' ends are told late, when cycle 1 is there already.
    await agents[0].report(exited(0, 7, message="CUDA error"))
    for agent in agents[:2]:
        await agent.until(RUN_WORKERS, 1)
    await agents[0].report(stopped[1])
    await agents[1].report(*stopped)
    for agent in agents[:2]:
        await agent.started(1)
    first = await served.until_fact("CycleRunning")
    second = await served.until_fact("CycleRunning", beyond=first.revision)
    assert second.cycle == 1
    await agents[1].break_stream()
    promoted = await agents[2].until(RUN_WORKERS, 2)
    assert promoted.desired.assignment.group_rank == 1
    assert promoted.desired.assignment.first_rank == 2
    again = await agents[0].until(RUN_WORKERS, 2)
    assert again.failed_cycle == 1
    assert promoted.desired.assignment.master_port != 0
    for agent in (agents[0], agents[2]):
        await agent.started(2)
    await served.until_fact("CycleRunning", beyond=second.revision)
    return Story(served, agents)
