"""A stand-in for the package nvidia-ml-py, which needs a GPU: the few calls that we make, answered from FAKE_NVML.

FAKE_NVML: `BUS-ID UUID STATE;...`, `hang`, or unset for a host without a driver. FAKE_NVML_DRIVER: `new`, `old` (knows
the older call only) or `too old` (knows neither). Structures and how they are handed over are those of the real one.
"""

import ctypes
import os
import signal
import uuid

NVML_SUCCESS = 0
NVML_GPU_FABRIC_STATE_NOT_SUPPORTED, NVML_GPU_FABRIC_STATE_COMPLETED = 0, 3
_STATES = {"NOT_SUPPORTED": 0, "NOT_STARTED": 1, "IN_PROGRESS": 2, "COMPLETED": 3}
_UUID_BYTES = 16
_V2 = 0x02000024


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class c_nvmlGpuFabricInfo_t(ctypes.Structure):
    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * _UUID_BYTES),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint),
    )


class c_nvmlGpuFabricInfoV_t(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        *c_nvmlGpuFabricInfo_t._fields_,
        ("healthMask", ctypes.c_uint32),
    )

    def __init__(self) -> None:
        super().__init__(version=_V2)


class _PciInfo(ctypes.Structure):
    _fields_ = (("busId", ctypes.c_char * 32),)


def nvmlInit() -> None:
    if "FAKE_NVML" not in os.environ:
        raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")
    if os.environ["FAKE_NVML"] == "hang":
        signal.pause()


def nvmlDeviceGetCount() -> int:
    return len(os.environ["FAKE_NVML"].split(";"))


def nvmlDeviceGetHandleByIndex(index: int) -> list[str]:
    return os.environ["FAKE_NVML"].split(";")[index].split()


def nvmlDeviceGetUUID(device: list[str]) -> bytes:
    return f"GPU-{device[0]}".encode()


def nvmlDeviceGetPciInfo(device: list[str]) -> _PciInfo:
    return _PciInfo(device[0].encode())


def nvmlDeviceGetGpuFabricInfoV(device: list[str], pointer: ctypes.c_void_p) -> int:
    if os.environ.get("FAKE_NVML_DRIVER", "new") != "new":
        raise NVMLError_FunctionNotFound("Function Not Found")
    info = ctypes.cast(pointer, ctypes.POINTER(c_nvmlGpuFabricInfoV_t)).contents
    assert info.version == _V2
    return _fill(info, device)


def nvmlDeviceGetGpuFabricInfo(device: list[str], pointer: ctypes.c_void_p) -> int:
    if os.environ.get("FAKE_NVML_DRIVER", "new") == "too old":
        raise NVMLError_FunctionNotFound("Function Not Found")
    return _fill(ctypes.cast(pointer, ctypes.POINTER(c_nvmlGpuFabricInfo_t)).contents, device)


def _fill(info: c_nvmlGpuFabricInfo_t | c_nvmlGpuFabricInfoV_t, device: list[str]) -> int:
    info.clusterUuid[:] = uuid.UUID(device[1]).bytes
    info.state = _STATES[device[2]]
    info.status = NVML_SUCCESS
    return NVML_SUCCESS
