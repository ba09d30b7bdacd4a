"""A program: says through NVML how this host's GPUs are, and what holds their memory. `watch_gpus SECONDS`.

A process of its own: on a broken GPU NVML can hang, and the agent sees that it says nothing. Asked `holders`, it
answers at once. Needs `pynvml` (package nvidia-ml-py). Knows neither the agent nor what health leads to.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

from . import rounds

LOOK_AT_EVENTS_EVERY_S = 1.0
HOLDERS = "holders"
RECOVERY_ACTION_FIELD = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; older packages have no name for it."""
ACTIONS = {
    1: ("UNHEALTHY", "needs a reset"),
    2: ("UNHEALTHY", "needs a reboot of the node"),
    3: ("DEGRADED", "its peer-to-peer traffic is to be drained"),
    4: ("DEGRADED", "is to be drained and reset"),
    5: ("DEGRADED", "its IMEX domain is to be recovered"),
    6: ("UNHEALTHY", "needs a reset of its bus"),
    7: ("UNHEALTHY", "needs a reboot of the system"),
}
"""What the driver says is to be done with a GPU (nvmlGpuRecoveryAction; 0: nothing)."""
OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs that a program's own mistake brings about: its worker fails, and that is told anyway."""
FATAL = {
    48: "double-bit ECC error",
    62: "micro-controller halted",
    64: "row remapping failed",
    79: "fell off the bus",
    95: "uncontained memory error",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
}
"""XIDs after which a GPU is of no use until somebody did something; others only make it be chosen last, for a while."""
REMEMBERED_S = 600.0


@dataclass
class Gpu:
    """One GPU that was there when the watch began, and the XIDs seen on it: by number, when last."""

    index: int
    uuid: str
    handle: Any
    xids: dict[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.uuid})"


class Watch:
    """All GPUs of this host. `pynvml` is the module, initialised."""

    def __init__(self, pynvml: Any) -> None:
        self._nvml = pynvml
        self.gpus = [self._gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
        self._events: Any = None
        try:
            self._events = pynvml.nvmlEventSetCreate()
            for gpu in self.gpus:
                pynvml.nvmlDeviceRegisterEvents(gpu.handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
        except pynvml.NVMLError:
            self._events = None  # not supported here: the recovery action and a lost device still tell

    def _gpu(self, index: int) -> Gpu:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = self._nvml.nvmlDeviceGetUUID(handle)
        return Gpu(index, uuid.decode() if isinstance(uuid, bytes) else uuid, handle)

    def take_events(self, now_s: float) -> bool:
        """XIDs that came since; whether there were any."""
        found = False
        while self._events is not None:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                index = self._nvml.nvmlDeviceGetIndex(event.device)
            except self._nvml.NVMLError_Timeout:
                break
            except self._nvml.NVMLError:
                break  # a GPU that is lost tells so when it is asked
            for gpu in self.gpus:
                if gpu.index == index and event.eventData not in OF_PROGRAMS:
                    gpu.xids[int(event.eventData)] = now_s
                    found = True
        return found

    def look(self, now_s: float) -> tuple[str, str]:
        """Health and why: the worst that any GPU says."""
        found = [verdict for gpu in self.gpus for verdict in self._of(gpu, now_s)]
        for wanted in ("UNHEALTHY", "DEGRADED"):
            whys = [why for state, why in found if state == wanted]
            if whys:
                return wanted, whys[0] if len(whys) == 1 else f"{whys[0]} (and {len(whys) - 1} more)"
        return "HEALTHY", ""

    def _of(self, gpu: Gpu, now_s: float) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        try:
            self._nvml.nvmlDeviceGetMemoryInfo(gpu.handle)
            value = self._nvml.nvmlDeviceGetFieldValues(gpu.handle, [RECOVERY_ACTION_FIELD])[0]
            action = value.value.uiVal if value.nvmlReturn == self._nvml.NVML_SUCCESS else 0
            if action:
                state, what = ACTIONS.get(action, ("DEGRADED", f"has recovery action {action}"))
                found.append((state, f"{gpu} {what}, its driver says"))
        except (self._nvml.NVMLError_GpuIsLost, self._nvml.NVMLError_NotFound):
            found.append(("UNHEALTHY", f"{gpu} is lost: it fell off the bus"))
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_InvalidArgument):
            pass  # an older driver knows no recovery action
        except self._nvml.NVMLError as error:
            found.append(("DEGRADED", f"{gpu} does not answer NVML: {error}"))
        for xid, at_s in gpu.xids.items():
            if xid in FATAL:
                found.append(("UNHEALTHY", f"{gpu} had XID {xid} ({FATAL[xid]})"))
            elif now_s - at_s < REMEMBERED_S:
                found.append(("DEGRADED", f"{gpu} had XID {xid}"))
        return found

    def holders(self) -> list[dict[str, Any]]:
        """Which processes hold memory of which GPU."""
        found: list[dict[str, Any]] = []
        for gpu in self.gpus:
            try:
                processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)
            except self._nvml.NVMLError:
                continue
            for one in processes:
                found.append({"gpu": gpu.index, "pid": one.pid, "mib": (one.usedGpuMemory or 0) >> 20})
        return found


def main(every_s: float) -> int:
    try:
        import pynvml

        pynvml.nvmlInit()
        watch = Watch(pynvml)
    except ImportError:
        return rounds.NOTHING_TO_WATCH
    except pynvml.NVMLError as error:
        rounds.say(note=str(error))
        return rounds.NOTHING_TO_WATCH
    if not watch.gpus:
        return rounds.NOTHING_TO_WATCH
    rounds.say(holders=watch.holders())
    next_look_s = 0.0
    while True:
        now_s = time.monotonic()
        if watch.take_events(now_s) or now_s >= next_look_s:
            rounds.report(*watch.look(now_s))
            next_look_s = now_s + every_s
        if rounds.asked_within(LOOK_AT_EVENTS_EVERY_S) == HOLDERS:
            rounds.say(holders=watch.holders())


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
