"""Which GPUs a node has and its workers see: stand-ins for nvidia-smi and pynvml, which need a GPU."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nvrx.client.config import JoinOptions, resolve
from nvrx.client.gpu_devices import Gpu, NodeGpus, host_gpus, visible_gpus
from nvrx.commandline import EXIT_USAGE, Failed
from nvrx.core.endpoint import HostPort
from nvrx.core.shape import NodeCounts
from tests.numa_machines import gpu_address, gpu_uuid, stand_in_nvidia_smi

TWO = tuple(Gpu(gpu_uuid(one), gpu_address(one)) for one in range(2))
BY_NVML = (Gpu("GPU-00000000:18:00.0", "0000:18:00.0"), Gpu("GPU-0000000F:C1:00.0", "000f:c1:00.0"))
FAKE_NVML = "00000000:18:00.0 - -;0000000F:C1:00.0 - -"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our stand-in for pynvml is found before the real one."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_nvml"))


@pytest.mark.rule("H1")
def test_nvml_tells_first_and_nvidia_smi_else(tmp_path: Path, env: dict[str, str], fake_nvml: None) -> None:
    assert host_gpus(env) is None
    asked = stand_in_nvidia_smi(tmp_path, 2)
    assert host_gpus(env) == TWO
    asked.unlink()
    assert host_gpus(env | {"FAKE_NVML": FAKE_NVML}) == BY_NVML
    assert not asked.exists()


@pytest.mark.rule("H1")
def test_a_driver_that_hangs_is_given_up(
    tmp_path: Path, env: dict[str, str], fake_nvml: None, caplog: pytest.LogCaptureFixture
) -> None:
    """nvidia-smi would hang in the same place, and is not asked."""
    asked = stand_in_nvidia_smi(tmp_path, 2)
    with caplog.at_level(logging.WARNING):
        assert host_gpus(env | {"FAKE_NVML": "hang"}, answers_within_s=1.0) is None
    assert "NVML did not answer within 1 s: this node's GPUs are not known" in caplog.text
    assert not asked.exists()


@pytest.mark.rule("H1")
def test_what_nvidia_smi_cannot_tell_of_a_gpu(tmp_path: Path, env: dict[str, str]) -> None:
    """A GPU that is lost keeps its place."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '0, {gpu_uuid(0)}, [GPU is lost]'\necho; echo 'warning: infoROM'\n")
    program.chmod(0o755)
    assert host_gpus(env) == (Gpu(gpu_uuid(0), ""),)


@pytest.mark.rule("G7")
def test_what_cuda_shows() -> None:
    first, second = TWO
    assert visible_gpus(TWO, {}) == TWO
    for text, expected in (
        ("1,0", (second, first)),
        (" 1 , 0 ", (second, first)),
        ("1", (second,)),
        ("", ()),
        ("0,2,1", (first,)),
        ("gpu-0", ()),
        (first.uuid, (first,)),
        (second.uuid[:12], (second,)),
        ("GPU-", ()),
        (f"MIG-{second.uuid}/1/0", (Gpu(f"MIG-{second.uuid}/1/0", second.pci_bus_id),)),
        ("MIG-aaaa,1", (Gpu("MIG-aaaa"), second)),
    ):
        assert visible_gpus(TWO, {"CUDA_VISIBLE_DEVICES": text}) == expected, text


@pytest.mark.rule("G7")
def test_gpus_are_asked_once(tmp_path: Path, env: dict[str, str]) -> None:
    asked = stand_in_nvidia_smi(tmp_path, 2)
    gpus = NodeGpus(env, tmp_path)
    assert gpus.visible() == TWO
    asked.unlink()
    assert gpus.visible(surely=True) == TWO
    assert not asked.exists()


@pytest.mark.rule("G7")
def test_as_many_workers_as_gpus(tmp_path: Path, env: dict[str, str]) -> None:
    options = JoinOptions((HostPort("127.0.0.1", 9),), ("true",), NodeCounts(1, 1), "gpu", log_dir=tmp_path)
    with pytest.raises(Failed, match="--nproc-per-node gpu: workers see no GPU here") as caught:
        resolve(options, env)
    assert caught.value.exit_code == EXIT_USAGE
    stand_in_nvidia_smi(tmp_path, 2)
    assert resolve(options, env).shape.workers_per_node == 2
    config = resolve(options, env | {"CUDA_VISIBLE_DEVICES": "1"})
    assert config.shape.workers_per_node == 1
    assert [(one.uuid, one.pci_bus_id) for one in config.numa.devices] == [(gpu_uuid(1), gpu_address(1))]
