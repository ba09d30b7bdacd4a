"""A program: `nvrx-node` on a machine that has GPUs, as far as it can tell. They are the stand-in for NVML of
tests/client/fake_nvml_watch; all else is real."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "client" / "fake_nvml_watch"))

from nvrx.client import cli
from nvrx.client.health import monitor

if __name__ == "__main__":
    monitor.gpus_may_be_there = lambda *_: True
    monitor.LOOK_AT_GPUS_EVERY_S = 0.2
    cli.program()
