"""A stand-in for the package nvidia-ml-py, which needs a GPU: what watch_gpus calls, answered from the file FAKE_NVML.

The file is JSON and is read at each call, so that a test can change it: `gpus`, each with `uuid` and perhaps
`recovery`, `lost`, `error` and `processes` ([pid, bytes]); `xids`, a list of [gpu, xid] that only grows; `hang`: all
calls hang.
Without the variable there is no driver. Names, errors and structures are those of the real one.
"""

import json
import os
import signal
from types import SimpleNamespace
from typing import Any

NVML_SUCCESS = 0
NVML_ERROR_NOT_SUPPORTED = 3
nvmlEventTypeXidCriticalError = 8
_taken = 0


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_Timeout(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_InvalidArgument(NVMLError):
    pass


class NVMLError_Unknown(NVMLError):
    pass


def _state() -> dict[str, Any]:
    with open(os.environ["FAKE_NVML"]) as file:
        told: dict[str, Any] = json.load(file)
    while told.get("hang"):
        signal.pause()
    return told


def _gpu(index: int) -> dict[str, Any]:
    told: dict[str, Any] = _state()["gpus"][index]
    if told.get("lost"):
        raise NVMLError_GpuIsLost("GPU is lost")
    if told.get("error"):
        raise NVMLError_Unknown("Unknown Error")
    return told


def nvmlInit() -> None:
    if "FAKE_NVML" not in os.environ:
        raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")
    _state()


def nvmlDeviceGetCount() -> int:
    return len(_state()["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetIndex(handle: int) -> int:
    return handle


def nvmlDeviceGetUUID(handle: int) -> str:
    return str(_gpu(handle)["uuid"])


def nvmlEventSetCreate() -> object:
    if _state().get("no_events"):
        raise NVMLError_NotSupported("Not Supported")
    return object()


def nvmlDeviceRegisterEvents(handle: int, types: int, events: object) -> None:
    assert types == nvmlEventTypeXidCriticalError


def nvmlEventSetWait_v2(events: object, timeout_ms: int) -> SimpleNamespace:
    global _taken
    assert timeout_ms == 0, "the watch must hear the agent meanwhile"
    xids = _state().get("xids", [])
    if _taken >= len(xids):
        raise NVMLError_Timeout("Timeout")
    index, xid = xids[_taken]
    _taken += 1
    return SimpleNamespace(device=index, eventType=nvmlEventTypeXidCriticalError, eventData=xid)


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    _gpu(handle)
    return SimpleNamespace(total=1 << 37, used=0, free=1 << 37)


def nvmlDeviceGetFieldValues(handle: int, fields: list[int]) -> list[SimpleNamespace]:
    assert fields == [230]
    action = _gpu(handle).get("recovery")
    code = NVML_SUCCESS if action is not None else NVML_ERROR_NOT_SUPPORTED
    return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=action or 0))]


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in _gpu(handle).get("processes", [])]
