"""Uses the stores that it is told of, by our client without torch: does what the test says and answers with the result.

Orders: `store` with `id`, `where` (`cycle` or `lasting`), `call` (a method of StoreClient) and `args`; bytes as text.
"""

import asyncio
import os
from typing import Any

from nvrx.core.endpoint import parse_endpoint
from nvrx.store.client import StoreClient, StoreGone

from .talk import Line, obey


class Stores:
    """One connection to each store, opened at the start and kept."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        lasting = parse_endpoint(os.environ["NVRX_STORE_ENDPOINT"])
        self._clients = {
            "cycle": self._connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
            "lasting": self._connect(lasting.host, lasting.port),
        }

    def _connect(self, host: str, port: int) -> StoreClient:
        return self._loop.run_until_complete(StoreClient.connect(host, port))

    def call(self, where: str, call: str, args: list[Any]) -> Any:
        given = [one.encode() if isinstance(one, str) and index else one for index, one in enumerate(args)]
        try:
            answer = self._loop.run_until_complete(getattr(self._clients[where], call)(*given))
        except StoreGone as gone:
            return f"gone: {gone}"
        return answer.decode() if isinstance(answer, bytes) else answer


def main() -> None:
    line = Line()
    stores = Stores()
    line.say("ready")

    def on_store(order: dict[str, Any]) -> None:
        line.say(f"answer {order['id']}", answer=stores.call(order["where"], order["call"], order["args"]))

    obey(line, {"store": on_store})


if __name__ == "__main__":
    main()
