"""torch's TCPStore alone: rank 0 serves on MASTER_PORT, the others wait for what it sets.

Rank 0 says, too, whether the port was held by somebody before it began.
"""

import os
import socket
from datetime import timedelta

from .talk import Line, obey


def is_held(port: int) -> bool:
    """Whether some socket is bound to the port, listening or not."""
    with socket.socket() as one:
        try:
            one.bind(("", port))
        except OSError:
            return True
    return False


def main() -> None:
    line = Line()
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    is_server = os.environ["RANK"] == "0"
    held = is_held(int(os.environ["MASTER_PORT"]))
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_server,
        timeout=timedelta(seconds=60),
    )
    if is_server:
        store.set("cycle", os.environ["NVRX_CYCLE"])
    line.say("read", cycle=int(store.get("cycle")), held=held)
    obey(line)
    os._exit(0)


if __name__ == "__main__":
    main()
