"""Holds rendezvous handlers of ours, as torchruns on many nodes would, and asks them what the test says.

One process, so that torch is imported once. There is no torch agent, so that no worker is started.
"""

import os
import threading
from typing import Any

from .talk import Line


class Handlers:
    """By name. Each order is carried out in a thread of its own, and answered when it is done."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._handlers: dict[str, Any] = {}
        self._stores: dict[str, Any] = {}

    def carry_out(self, order: dict[str, Any]) -> None:
        answer: dict[str, Any] = {}
        try:
            answer["value"] = getattr(self, f"do_{order['do']}")(order)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is what the test asked for
            answer |= {"raised": type(error).__name__, "text": str(error)}
        with self._lock:
            self._line.say(f"answer {order['number']}", **answer)

    def do_make(self, order: dict[str, Any]) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        params = RendezvousParameters(
            "nvrx", order["endpoint"], order["run_id"], order["min_nodes"], order["max_nodes"], None, **order["conf"]
        )
        self._handlers[order["name"]] = get_rendezvous_handler(params)

    def do_next(self, order: dict[str, Any]) -> dict[str, Any]:
        info = self._handlers[order["name"]].next_rendezvous()
        self._stores[order["name"]] = info.store
        where = info.bootstrap_store_info
        return {
            "rank": info.rank,
            "world_size": info.world_size,
            "store": f"{where.master_addr}:{where.master_port}",
            "cycle": int(os.environ["NVRX_CYCLE"]),
        }

    def do_waiting(self, order: dict[str, Any]) -> int:
        return int(self._handlers[order["name"]].num_nodes_waiting())

    def do_closed(self, order: dict[str, Any]) -> bool:
        return bool(self._handlers[order["name"]].is_closed())

    def do_shutdown(self, order: dict[str, Any]) -> bool:
        return bool(self._handlers[order["name"]].shutdown())

    def do_set(self, order: dict[str, Any]) -> None:
        self._stores[order["name"]].set(order["key"], order["value"])

    def do_get(self, order: dict[str, Any]) -> str:
        return str(self._stores[order["name"]].get(order["key"]).decode())


def main() -> None:
    line = Line("handlers")
    handlers = Handlers(line)
    for order in line.orders():
        threading.Thread(target=handlers.carry_out, args=(order,), daemon=True).start()
    os._exit(0)


if __name__ == "__main__":
    main()
