"""torch's own TCPStore server as a process: each line read opens one more store, whose port is printed; ends at the
end of its input. Knows nothing of ours."""

from __future__ import annotations

import os
import sys

from torch.distributed import TCPStore  # type: ignore[attr-defined]

if __name__ == "__main__":
    stores = []
    for _line in sys.stdin:
        stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        print(stores[-1].port, flush=True)
    # Without the half second that each store takes to end.
    os._exit(0)
