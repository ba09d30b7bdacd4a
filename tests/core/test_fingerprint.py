"""What nodes compare of their environments, and what stays at home (A2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx.core.fingerprint import (
    MAX_TEXT,
    NOT_COMPARED,
    SHOWN,
    Differing,
    Machine,
    Wishes,
    agree,
    differing,
    fingerprint,
    is_secret_name,
    same_env_problem,
)

Env = dict[str, str]
TRAIN = ("python", "train.py")


def taken(
    env: Env | None = None,
    command: tuple[str, ...] = TRAIN,
    name: str = "n0",
    pids: tuple[int, ...] = (4242,),
    same_env: tuple[str, ...] = (),
    ignore_env: tuple[str, ...] = (),
) -> dict[str, str]:
    return fingerprint(command, env or {}, Machine((name,), pids, "3.12.1", "2.9.0"), Wishes(same_env, ignore_env))


def array_task(task: int, **more: str) -> Env:
    """C037: three tasks of array 36; the highest task has the array's own job id."""
    return {
        "SLURM_JOB_ID": str({3: 36, 1: 37, 2: 38}[task]),
        "SLURM_ARRAY_JOB_ID": "36",
        "SLURM_ARRAY_TASK_ID": str(task),
        "SLURM_PROCID": "0",
        "SLURMD_NODENAME": f"node{task + 8}",
        **more,
    }


@pytest.mark.rule("A2")
def test_what_is_compared() -> None:
    env = {
        **dict.fromkeys(["NCCL_DEBUG", "TORCH_LOGS", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS", "MINE"], "x"),
        **dict.fromkeys(["CUDA_VISIBLE_DEVICES", "NCCL_HOSTID", "TORCH_RANK", "CUDA_LOCAL_RANK_0"], "x"),
        **dict.fromkeys(["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "HOSTNAME", "SLURM_PROCID", "PATH"], "x"),
        **dict.fromkeys(["TORCHELASTIC_RESTART_COUNT", "XNCCL_DEBUG", "nccl_debug", "NVRX_RUN_ID"], "x"),
        "NCCL_EMPTY": "",
    }
    assert taken(env, same_env=("MINE", "GONE")) == {
        **dict.fromkeys(["NCCL_DEBUG", "TORCH_LOGS", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS", "MINE"], "x"),
        "command": "python train.py",
        "python": "3.12.1",
        "torch": "2.9.0",
    }


@pytest.mark.rule("A2")
def test_versions_that_are_not_known_are_left_out() -> None:
    assert fingerprint(TRAIN, {}, Machine((), ()), Wishes()) == {"command": "python train.py"}


@pytest.mark.rule("A2")
@pytest.mark.parametrize(
    "name", ["RANK", "LOCAL_RANK", "MY_RANK", "WORLD_SIZE", "HOSTNAME", "HOST", "SLURM_JOB_PARTITION"]
)
def test_what_differs_by_nature_cannot_be_asked_for(name: str) -> None:
    assert name in (same_env_problem(["A", name]) or "")


@pytest.mark.rule("A2")
@pytest.mark.parametrize("name", ["", "A=B", "A\n"])
def test_what_is_no_name_cannot_be_asked_for(name: str) -> None:
    assert same_env_problem([name])
    assert same_env_problem(["HF_HOME", "MY_FRANKNESS", "GHOST"]) is None


@pytest.mark.rule("A2")
def test_turned_off_it_is_empty_and_agrees_with_all() -> None:
    off = fingerprint(TRAIN, {"NCCL_DEBUG": "INFO"}, Machine((), ()), Wishes(is_off=True))
    assert off == {}
    assert differing(off, taken()) == differing(taken(), off) == []


@pytest.mark.rule("A2")
def test_an_ignored_entry_agrees_with_all_whichever_node_ignores_it() -> None:
    one, other = taken({"NCCL_DEBUG": "INFO"}), taken({"NCCL_DEBUG": "WARN"}, command=("sh",))
    lenient = taken({"NCCL_DEBUG": "WARN"}, command=("sh",), ignore_env=("NCCL_DEBUG", "command", "OTHER"))
    assert [found.name for found in differing(one, other)] == ["NCCL_DEBUG", "command"]
    assert differing(one, lenient) == differing(lenient, one) == []
    assert lenient["OTHER"] == NOT_COMPARED


@pytest.mark.rule("A2")
@pytest.mark.parametrize(
    ("one", "other"),
    [("INFO", "WARN"), ("INFO", None), ("a", "b"), ("1", "2"), ("a", "aa"), ("", "x"), ("/a/1", "/a/2")],
)
def test_different_values_differ(one: str, other: str | None) -> None:
    assert differing({"X": one}, {"X": other} if other is not None else {"Y": "y"})
    assert not agree(one, other)
    assert not agree(other, one)


@pytest.mark.rule("A2")
@pytest.mark.parametrize(
    "word",
    [
        "--job={SLURM_JOB_ID}",
        "/scratch/{SLURM_JOB_ID}/out",
        "--out=/ckpt/{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}/log",
        "--log=/logs/task-{SLURM_ARRAY_TASK_ID}.log",
        "--task={SLURM_ARRAY_TASK_ID}",
        "{SLURM_ARRAY_TASK_ID}",
        "job{SLURM_JOB_ID}",
        "/local/{SLURMD_NODENAME}/x",
        "{SLURMD_NODENAME}.cluster.local",
        "/tmp/nvrx-{pid}-{SLURM_JOB_ID}",
        "tcp://{SLURMD_NODENAME}:29500",
    ],
)
def test_own_ids_in_the_command_agree_within_an_array(word: str) -> None:
    """C037: each task has another job id, task id, node and process id; all of them name the same thing."""
    found = []
    for task in (1, 2, 3):
        env = array_task(task)
        written = word.format(pid=9000 + task, **env)
        found.append(taken(env, (*TRAIN, "--lr", "3e-4", written), env["SLURMD_NODENAME"], (9000 + task,)))
    assert differing(found[0], found[1]) == differing(found[1], found[2]) == differing(found[2], found[0]) == []
    wrong = taken(array_task(2), (*TRAIN, "--lr", "1e-4", word.format(pid=9002, **array_task(2))), "node10", (9002,))
    assert [one.name for one in differing(found[0], wrong)] == ["command"]


@pytest.mark.rule("A2")
def test_own_ids_in_values_agree_within_an_array() -> None:
    envs = [
        array_task(
            task,
            NCCL_DEBUG_FILE=f"/logs/{job}/nccl.{task}.{node}.log",
            CUDA_CACHE_PATH=f"/scratch/{job}_{task}",
            TORCH_HOME="/shared/torch",
        )
        for task, job, node in ((1, 37, "node9"), (2, 38, "node10"), (3, 36, "node11"))
    ]
    found = [taken(env, name=env["SLURMD_NODENAME"]) for env in envs]
    assert differing(found[0], found[1]) == differing(found[1], found[2]) == []


@pytest.mark.rule("A2")
@pytest.mark.parametrize(
    "word", ["--layers=1", "run-1", "s3://data-2/part-0", "0.1", "1", "1,2", "node9", "v36", "--seed 37"]
)
def test_the_same_command_agrees_whatever_ids_its_numbers_look_like(word: str) -> None:
    """A mark is a possibility: equal texts are equal, though for one of the nodes a 1 is its task's id."""
    command = (*TRAIN, *word.split())
    found = [taken(array_task(task), command, f"node{task + 8}") for task in (1, 2, 3)]
    assert differing(found[0], found[1]) == differing(found[1], found[2]) == differing(found[2], found[0]) == []


@pytest.mark.rule("A2")
@pytest.mark.parametrize(
    ("variable", "texts"),
    [
        ("NCCL_P2P_DISABLE", ("0", "1")),
        ("OMP_NUM_THREADS", ("0", "1")),
        ("NCCL_MIN_NCHANNELS", ("0", "1")),
        ("CUDA_LAUNCH_X", ("0.5", "1.5")),
        ("NCCL_SHAPE", ("0,4", "1,4")),
    ],
)
def test_a_small_number_alone_is_no_process_id(variable: str, texts: tuple[str, str]) -> None:
    """Nodes 0 and 1 that set a switch to 0 and 1 differ."""
    one, other = (
        taken({"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_ARRAY_TASK_ID": str(rank), variable: text})
        for rank, text in enumerate(texts)
    )
    assert [found.name for found in differing(one, other)] == [variable]


@pytest.mark.rule("A2")
def test_process_ids_within_a_name_agree() -> None:
    one, other = (
        taken({"SLURM_PROCID": str(rank), "NCCL_DEBUG_FILE": f"/logs/nccl.{rank}.txt"}, (*TRAIN, f"--log=out-{rank}"))
        for rank in (0, 1)
    )
    assert differing(one, other) == []


@pytest.mark.rule("A2")
def test_a_name_is_not_found_within_another() -> None:
    """Node `n1` does not make `n10` or `lan1` its own."""
    assert not agree(
        taken({"NCCL_SOCKET_IFNAME": "lan1"}, name="n1")["NCCL_SOCKET_IFNAME"],
        taken({"NCCL_SOCKET_IFNAME": "lan2"}, name="n2")["NCCL_SOCKET_IFNAME"],
    )
    env = {"NCCL_X": "n10 n1 n1-ib 36361 job36 n1.gpu.local", "SLURM_JOB_ID": "36"}
    assert taken(env, name="n1.gpu")["NCCL_X"] == "n10 {node:n1} {node:n1}-ib 36361 job{job:36} {node:n1.gpu}.local"


@pytest.mark.rule("A2", "J2")
@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "NCCL_SECRET",
        "TORCH_HUB_PASSWORD",
        "APIKEY",
        "aws-secret-access-key",
        "GITHUBTOKEN",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)
    assert not any(map(is_secret_name, ["--tokenizer-model", "TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "--keyframes"]))


@pytest.mark.rule("A2", "J2")
@pytest.mark.parametrize(
    "command",
    [
        ("python", "t.py", "--hf-token", "S3CRET"),
        ("python", "t.py", "--hf_token=S3CRET"),
        ("env", "WANDB_API_KEY=S3CRET", "python", "t.py"),
        ("python", "t.py", "--url", "https://user:S3CRET@host/x"),
        ("python", "t.py", "--password", "S3CRET", "--lr", "1"),
    ],
)
def test_secrets_never_travel_and_are_compared_all_the_same(command: tuple[str, ...]) -> None:
    env = {"NCCL_API_KEY": "S3CRET", "HF_TOKEN": "S3CRET", "TORCH_INDEX": "https://me:S3CRET@host"}
    found = taken(env, command, same_env=("HF_TOKEN",))
    assert "S3CRET" not in str(found)
    assert found["HF_TOKEN"].startswith("(secret, digest ")
    changed = tuple(word.replace("S3CRET", "other") for word in command)
    assert [one.name for one in differing(found, taken(env, changed, same_env=("HF_TOKEN",)))] == ["command"]
    other = taken({name: text.replace("S3CRET", "x") for name, text in env.items()}, command, same_env=("HF_TOKEN",))
    assert [one.name for one in differing(found, other)] == ["HF_TOKEN", "NCCL_API_KEY", "TORCH_INDEX"]


@pytest.mark.rule("A2")
def test_words_are_told_apart() -> None:
    assert differing(taken(command=("a", "b c")), taken(command=("a", "b", "c")))
    assert taken(command=("a", "b c", ""))["command"] == "a 'b c' ''"


@pytest.mark.rule("A2", "J4")
def test_long_and_odd_texts_can_travel() -> None:
    """A list of data sets; a byte that is no text. What is cut off is compared by its digest, without own ids."""
    files = [f"/data/shard-{one}" for one in range(1000)]
    found = [
        taken(array_task(task), (*TRAIN, f"/{array_task(task)['SLURMD_NODENAME']}/x", *files, f"--n={last}"))
        for task, last in ((1, 5), (2, 5), (3, 6))
    ]
    assert len(found[0]["command"]) <= MAX_TEXT + 100
    assert differing(found[0], found[1]) == []
    (only,) = differing(found[1], found[2])
    assert only.name == "command"
    same = [taken(array_task(task), (*TRAIN, *files)) for task in (1, 2)]
    assert differing(*same) == [], "numbers like own ids, in the same command"
    taken({"NCCL_X": "\udcff"}, ("\udcff", "\x00"))["NCCL_X"].encode()


@pytest.mark.rule("A2")
def test_a_difference_is_shown_where_it_is_and_as_it_was_written() -> None:
    long = "x" * 1000
    envs = [array_task(task, NCCL_X=f"/{array_task(task)['SLURM_JOB_ID']}/{task}/a{task * 'b'}") for task in (1, 2)]
    (found,) = differing(*(taken(env) for env in envs))
    assert found == Differing("NCCL_X", "/37/1/ab", "/38/2/abb")
    (found,) = differing({"X": f"{long}1{long}"}, {"X": f"{long}2{long}"})
    assert (len(found.one), len(found.other)) == (SHOWN, SHOWN)
    assert "x1x" in found.one
    assert "x2x" in found.other
    words = tuple(f"--option-{one}" for one in "abcdefghijklmnopqrstuvwxyz")
    (found,) = differing(
        *(
            taken(array_task(task), (f"/{array_task(task)['SLURMD_NODENAME']}/x", *words, f"--lr={task}e-4"))
            for task in (1, 2)
        )
    )
    assert found.one.endswith("--option-z --lr=1e-4")
    assert found.other.endswith("--option-z --lr=2e-4")
    (found,) = differing({"X": "a"}, {"Y": "b", "X": "a"})
    assert found == Differing("Y", "(unset)", "b")


_TEXT = st.text(st.sampled_from("ab1{}:+"), max_size=12)


@pytest.mark.rule("A2", "J4")
@given(_TEXT | st.sampled_from(["{node:}", "{node:a}", "{node+pid:1}", "{job:1}1"]), _TEXT)
def test_agreement_is_symmetrical_and_ends_whatever_a_peer_sends(one: str, other: str) -> None:
    assert agree(one, one)
    assert agree(one, other) == agree(other, one)
    assert agree(f"/{{node:{'q'}}}/{one}", f"/{{node:{'r'}}}/{one}")
