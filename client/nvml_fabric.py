"""A program: asks this host's GPUs through NVML which NVLink cluster they belong to; one line for each GPU.

A process of its own, because NVML can hang on a broken GPU and would keep the agent with it. Needs `pynvml` (package
nvidia-ml-py). Knows neither the agent nor what a domain is for.
"""

from __future__ import annotations

import ctypes
import sys
import uuid
from typing import Any

NO_CLUSTER = "-"

_CALLS = (
    ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfoV_t"),
    ("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t"),
)
"""The newer one first: drivers and packages know one of them, or both."""


def main() -> int:
    """Print `PCI-BUS-ID UUID`, with `-` where a GPU names no cluster; 1 with NVML's words where it cannot be asked."""
    import pynvml

    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            bus_id = pynvml.nvmlDeviceGetPciInfo(device).busId
            print(bus_id.decode() if isinstance(bus_id, bytes) else bus_id, _cluster(pynvml, device))
    except pynvml.NVMLError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _cluster(pynvml: Any, device: Any) -> str:
    """What one GPU says. Only one whose registration with the fabric is complete and went well has a cluster."""
    for call, structure in _CALLS:
        if not hasattr(pynvml, call):
            continue
        info = getattr(pynvml, structure)()
        try:
            getattr(pynvml, call)(device, ctypes.byref(info))
        except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported):
            continue
        if info.state != pynvml.NVML_GPU_FABRIC_STATE_COMPLETED or info.status != pynvml.NVML_SUCCESS:
            return NO_CLUSTER
        # Not the field's value: older packages end it at the first zero byte.
        field = type(info).clusterUuid
        return str(uuid.UUID(bytes=ctypes.string_at(ctypes.addressof(info) + field.offset, field.size)))
    return NO_CLUSTER


if __name__ == "__main__":
    sys.exit(main())
