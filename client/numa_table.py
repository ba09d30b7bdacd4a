"""What `nvrx-node check` says of the NUMA bindings: pure text, made from the plan."""

from __future__ import annotations

from collections.abc import Iterator

from nvrx.core.facts import Device
from nvrx.core.numa import Binding, binding_words, number_list

from .numa import NumaPlan

_COLUMNS = ("local rank", "GPU", "its node", "bound to", "CPUs", "by")
_INDENT = " " * 10


def numa_lines(plan: NumaPlan) -> Iterator[str]:
    """A heading, a row for each worker where anything is known, and what is to be looked at."""
    yield f"numa      {f'workers bound by {plan.source.value}' if plan.bindings else '(workers not bound)'}"
    rows = _rows(plan)
    widths = [max(len(row[column]) for row in [_COLUMNS, *rows]) for column in range(len(_COLUMNS))]
    for row in [_COLUMNS, *rows] if rows else []:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield f"{_INDENT}{'  '.join(cells)}".rstrip()
    for note in plan.notes:
        yield f"warning   {note}"


def _rows(plan: NumaPlan) -> list[tuple[str, ...]]:
    gpus = {one.local_rank: one for one in plan.gpus}
    bindings = {one.local_rank: one for one in plan.bindings}
    return [_row(local_rank, gpus.get(local_rank), bindings.get(local_rank)) for local_rank in sorted(gpus | bindings)]


def _row(local_rank: int, gpu: Device | None, binding: Binding | None) -> tuple[str, ...]:
    name = (gpu.pci_bus_id or gpu.uuid) if gpu is not None else "-"
    node = str(gpu.numa_node) if gpu is not None and gpu.numa_node is not None else "-"
    if binding is None:
        return (str(local_rank), name, node, "-", "-", "-")
    cpus = number_list(binding.cpus) if binding.cpus else "?"
    return (str(local_rank), name, node, f"node {binding.node}", cpus, " ".join(binding_words(binding)))
