"""`nvrx-node check`: what join would check, said line by line; nothing is joined or started."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nvrx.channel import CHANNEL_OPTIONS, bearer, describe

from .config import NodeConfig, Surroundings
from .coordinator import EXIT_NEVER_REACHED, RPC_TIMEOUT_S
from .health.monitor import HealthMonitor
from .health.watching import ANSWERS_WITHIN_S
from .numa_table import numa_lines


async def check_node(config: NodeConfig) -> int:
    """Print the node's place and reach each coordinator; 0, or 4 where none answers."""
    shape = config.shape
    print(f"node      {config.node_id}")
    print(f"run       {config.run_id or '(the coordinator says)'}")
    print(f"shape     {shape.min_nodes}:{shape.max_nodes} nodes, {shape.workers_per_node} workers each")
    sizes = {one.name: getattr(shape.parallel, one.name) for one in dataclasses.fields(shape.parallel)}
    given = [f"{name}={size}" for name, size in sizes.items() if size is not None and size != 1]
    print(f"parallel  {', '.join(given) or '(no sizes)'}")
    print(f"order     {', '.join(f'{source.value}={text}' for source, text in config.order_sources.items())}")
    around = config.surroundings
    print(f"group     {_group(around)}")
    print(f"domain    {around.domain_id or '(not asked for)'}")
    print(f"compared  {', '.join(sorted(shape.fingerprint)) or '(nothing)'}")
    for line in numa_lines(config.numa):
        print(line)
    print(f"command   {' '.join(config.argv)}")
    print(f"logs      {config.options.log_dir}")
    await _say_health(config)
    reached = False
    for endpoint in config.options.coordinators:
        async with grpc.aio.insecure_channel(str(endpoint), options=CHANNEL_OPTIONS) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(
                    health_pb2.HealthCheckRequest(), timeout=RPC_TIMEOUT_S, metadata=bearer(config.options.token)
                )
            except grpc.aio.AioRpcError as error:
                print(f"coordinator {endpoint} not reached: {describe(error)}")
                continue
        reached = True
        leads = answer.status == health_pb2.HealthCheckResponse.SERVING
        print(f"coordinator {endpoint} answers{'' if leads else ', and does not lead'}")
    return 0 if reached else EXIT_NEVER_REACHED


async def _say_health(config: NodeConfig) -> None:
    """What each health check says the first time."""
    monitor = HealthMonitor(config.health, config.environment, lambda: None)
    monitor.start(lambda _: None)
    try:
        async with asyncio.timeout(config.health.interval_s + ANSWERS_WITHIN_S):
            await monitor.all_told.wait()
    except TimeoutError:
        pass  # what has not told is shown so
    finally:
        monitor.close()
    for name, report in monitor.each.items():
        print(f"health    {name}: {'no answer yet' if report is None else report.state.value.lower()}", end="")
        print(f" ({report.reason})" if report is not None and report.reason else "")
    if not monitor.each:
        print("health    (no checks)")


def _group(around: Surroundings) -> str:
    if around.group is None:
        return "(none)"
    array = f" of array {around.group.array_job_id}" if around.group.array_job_id else ""
    return f"{around.group.group_id}{array}, {around.replacement_group_size} nodes"
