"""A program: asks NVML which GPUs this host has; one line for each, in NVML's order (that of PCI addresses).

A process of its own, because NVML can hang on a broken GPU and would keep the agent with it. Needs `pynvml` (package
nvidia-ml-py). Knows neither the agent nor what the answer is for.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Print `INDEX, UUID, PCI-BUS-ID` as nvidia-smi does; 1 with NVML's words where it cannot be asked."""
    import pynvml

    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            told = pynvml.nvmlDeviceGetUUID(device), pynvml.nvmlDeviceGetPciInfo(device).busId
            print(index, *(one.decode() if isinstance(one, bytes) else one for one in told), sep=", ")
    except pynvml.NVMLError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
