"""The NVLink cluster that a node's GPUs name (B7): stand-ins for nvidia-smi and pynvml, which need a GPU, and both
asked as on a node."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx.client.gpu import cluster_uuid
from nvrx.commandline import EXIT_USAGE, Failed

ROOT = Path(__file__).resolve().parents[2]
ONE, OTHER = "5a3b8d1e-0000-4c2f-9d00-7be1f0a2c344", "00000000-0000-0000-0000-0000000000b2"
NONE = "00000000-0000-0000-0000-000000000000"
BUS_IDS = ("00000000:18:00.0", "00000001:18:00.0")

NVIDIA_SMI_HEAD = """\
==============NVSMI LOG==============

Timestamp                                 : Mon Nov 30 07:55:49 2026
Driver Version                            : 570.172.08
CUDA Version                              : 12.8

Attached GPUs                             : 2
"""
NVIDIA_SMI_GPU = """\
GPU {bus_id}
    Product Name                          : NVIDIA GB200
    GPU UUID                              : GPU-{bus_id}
    MIG Mode
        Current                           : Disabled
    GSP Firmware Version                  : 570.172.08
    PCI
        Bus                               : 0x18
        Bus Id                            : {bus_id}
    Fabric
        State                             : {state}
        Status                            : {status}
        CliqueId                          : 32766
        ClusterUUID                       : {cluster}
        Health
            Bandwidth                     : Full
            Route Unhealthy               : False
    Processes                             : None
    Capabilities
        State                             : none of a fabric
        EGM                               : disabled

"""


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Where our stand-in for pynvml is found before the real one; as it is, NVML cannot be asked."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_nvml"))
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}


def nvidia_smi(directory: Path, script: str) -> None:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def told_by_nvidia_smi(directory: Path, *clusters: str, state: str = "Completed", status: str = "Success") -> None:
    """Let it print a fabric section for each GPU."""
    told = [
        NVIDIA_SMI_GPU.format(bus_id=bus_id, cluster=cluster, state=state, status=status)
        for bus_id, cluster in zip(BUS_IDS, clusters, strict=False)
    ]
    (directory / "told").write_text(NVIDIA_SMI_HEAD + "\n" + "".join(told))
    nvidia_smi(directory, f'test "$*" = -q && exec cat {directory}/told')


def told_by_nvml(*gpus: str) -> str:
    """The value of FAKE_NVML for GPUs given as `UUID STATE`."""
    return ";".join(f"{bus_id} {gpu}" for bus_id, gpu in zip(BUS_IDS, gpus, strict=False))


@pytest.mark.rule("B7")
@pytest.mark.parametrize(
    ("clusters", "expected"),
    [((ONE, ONE), ONE), ((ONE.upper(), ONE), ONE), ((NONE, NONE), None), (("N/A", "N/A"), None), ((), None)],
)
def test_what_nvidia_smi_prints(
    tmp_path: Path, env: dict[str, str], clusters: tuple[str, ...], expected: str | None
) -> None:
    told_by_nvidia_smi(tmp_path, *clusters)
    assert cluster_uuid(env) == expected


@pytest.mark.rule("B7")
@pytest.mark.parametrize(
    ("state", "status"), [("N/A", "N/A"), ("In Progress", "N/A"), ("Completed", "Initialization Failure")]
)
def test_a_fabric_that_is_not_there_yet(tmp_path: Path, env: dict[str, str], state: str, status: str) -> None:
    told_by_nvidia_smi(tmp_path, ONE, ONE, state=state, status=status)
    assert cluster_uuid(env) is None


@pytest.mark.rule("B7")
def test_gpus_that_disagree_are_an_error_that_names_them(tmp_path: Path, env: dict[str, str]) -> None:
    for first, second, words in ((ONE, OTHER, OTHER), (ONE, NONE, "none")):
        told_by_nvidia_smi(tmp_path, first, second)
        with pytest.raises(Failed) as caught:
            cluster_uuid(env)
        assert caught.value.exit_code == EXIT_USAGE
        assert f"{BUS_IDS[0]} {ONE}, {BUS_IDS[1]} {words}" in str(caught.value)
        assert "NVRX_DOMAIN_ID" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.rule("B7")
def test_where_nvidia_smi_fails_or_is_missing_there_is_none(tmp_path: Path, env: dict[str, str]) -> None:
    missing = {**env, "PATH": str(tmp_path)}
    assert cluster_uuid(missing) is None
    nvidia_smi(
        tmp_path,
        "echo 'NVIDIA-SMI has failed because it couldn'\"'\"'t communicate with the NVIDIA driver. Make sure that the "
        "latest NVIDIA driver is installed and running.'; exit 9",
    )
    assert cluster_uuid(env) is None
    (tmp_path / "nvidia-smi").write_text("\x7fnot a program")
    assert cluster_uuid(env) is None


@pytest.mark.rule("B7")
def test_an_nvidia_smi_that_hangs_is_given_up(
    tmp_path: Path, env: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    nvidia_smi(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    with caplog.at_level(logging.WARNING):
        assert cluster_uuid(env, answers_within_s=1.0) is None
    assert "nvidia-smi -q did not answer within 1 s" in caplog.text
    assert "NVRX_DOMAIN_ID" in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.rule("B7")
@pytest.mark.parametrize("driver", ["new", "old"])
def test_nvml_is_asked_first(tmp_path: Path, env: dict[str, str], driver: str) -> None:
    told_by_nvidia_smi(tmp_path, OTHER)
    env["FAKE_NVML_DRIVER"] = driver
    for gpus, expected in (
        ((f"{ONE} COMPLETED", f"{ONE} COMPLETED"), ONE),
        ((f"{ONE} IN_PROGRESS", f"{ONE} IN_PROGRESS"), None),
        ((f"{ONE} NOT_SUPPORTED",), None),
        ((f"{NONE} COMPLETED",), None),
    ):
        assert cluster_uuid({**env, "FAKE_NVML": told_by_nvml(*gpus)}) == expected
    with pytest.raises(Failed, match=f"{BUS_IDS[0]} {ONE}, {BUS_IDS[1]} {OTHER}"):
        cluster_uuid({**env, "FAKE_NVML": told_by_nvml(f"{ONE} COMPLETED", f"{OTHER} COMPLETED")})


@pytest.mark.rule("B7")
def test_without_a_driver_nvml_gives_way_to_nvidia_smi(tmp_path: Path, env: dict[str, str]) -> None:
    """Also where a driver is too old to know of fabrics at all: that is an answer, none."""
    told_by_nvidia_smi(tmp_path, OTHER)
    assert cluster_uuid(env) == OTHER
    too_old = {**env, "FAKE_NVML": told_by_nvml(f"{ONE} COMPLETED"), "FAKE_NVML_DRIVER": "too old"}
    assert cluster_uuid(too_old) is None


@pytest.mark.rule("B7")
def test_an_nvml_that_hangs_is_given_up(tmp_path: Path, env: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """nvidia-smi would hang in the same place, and is not asked."""
    nvidia_smi(tmp_path, f"touch {tmp_path}/asked")
    with caplog.at_level(logging.WARNING):
        assert cluster_uuid({**env, "FAKE_NVML": "hang"}, answers_within_s=1.0) is None
    assert "NVML did not answer within 1 s" in caplog.text
    assert not (tmp_path / "asked").exists()


@pytest.mark.rule("B7")
def test_the_agent_asks_only_where_it_has_to(tmp_path: Path, env: dict[str, str]) -> None:
    """`nvrx-node check` says the domain; without a segment size, or with a domain by name, no GPU is asked."""
    told_by_nvidia_smi(tmp_path, ONE, ONE)
    path = f"{Path(__file__).parent / 'fake_nvml'}:{ROOT}"
    log_dir = ("--log-dir", str(tmp_path / "logs"))

    def checked(*options: str, **more: str) -> tuple[str, bool]:
        asked = tmp_path / "asked"
        asked.unlink(missing_ok=True)
        # Which GPUs there are is asked in any case, for rank maps; their clusters, with -q, are not.
        nvidia_smi(tmp_path, f'test "$*" = -q || exit 6; touch {asked}; exec cat {tmp_path}/told')
        done = subprocess.run(
            [sys.executable, "-m", "nvrx.client.cli", "check", "--coordinator", "127.0.0.1:9", *log_dir, *options],
            env={**env, "PYTHONPATH": path, "HOME": str(tmp_path), **more},
            capture_output=True,
            text=True,
            check=False,
        )
        line = next(line for line in [*done.stdout.splitlines(), done.stderr] if line.startswith("domain"))
        return line.split(maxsplit=1)[1], asked.exists()

    assert checked("--segment-size", "1") == (ONE, True)
    assert checked("--segment-size", "1", NVRX_DOMAIN_ID="D1") == ("D1", False)
    assert checked() == ("(not asked for)", False)
