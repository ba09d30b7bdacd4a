"""A small data-parallel training that survives restarts: the model code of the nvrx examples.

It does not know who starts it. `nvrx-node join` and torchrun both set RANK, WORLD_SIZE and MASTER_ADDR, and
both start it anew after a failure; what carries training across is the checkpoint, nothing else:

    torchrun --nproc-per-node 2 examples/train_ddp.py --checkpoint-dir /tmp/ckpt
    nvrx-node join --coordinator HOST:PORT --nproc-per-node 2 -- \\
        python examples/train_ddp.py --checkpoint-dir /shared/ckpt

With several machines the checkpoint directory must be on a file system that all of them see, because rank 0
may be on another machine after a restart.

SIGTERM is not caught. Workers get it when another worker has died, and then the gradients of the running step
can no longer be summed: the newest checkpoint already is the best state there is.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SEED = 1234
FEATURES, CLASSES, EXAMPLES, BATCH_PER_RANK = 32, 8, 8192, 32
CHECKPOINTS_KEPT = 2


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Features (EXAMPLES, FEATURES) and labels (EXAMPLES); a fixed random network gives the labels."""
    generator = torch.Generator().manual_seed(SEED)
    features = torch.randn(EXAMPLES, FEATURES, generator=generator)
    hidden = torch.tanh(features @ torch.randn(FEATURES, FEATURES, generator=generator) / FEATURES**0.5)
    return features, (hidden @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(dim=1)


def make_model() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def shard(step: int, rank: int, world_size: int) -> torch.Tensor:
    """Which examples this rank sees in this step: every rank others, each example once per epoch.

    It follows from the step alone, so a restarted world of the same size goes on with the same data.
    """
    steps_per_epoch = EXAMPLES // (BATCH_PER_RANK * world_size)
    epoch, step_in_epoch = divmod(step, steps_per_epoch)
    order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(SEED + epoch))
    first = (step_in_epoch * world_size + rank) * BATCH_PER_RANK
    return order[first : first + BATCH_PER_RANK]


def save_checkpoint(directory: Path, state: dict[str, Any]) -> None:
    """Write, flush, then rename: a kill at any moment leaves the old checkpoint or the new one, whole."""
    path = directory / f"step-{state['step']:08d}.pt"
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    for old in sorted(directory.glob("step-*.pt"))[:-CHECKPOINTS_KEPT]:
        old.unlink()


def load_newest_checkpoint(directory: Path, rank: int) -> dict[str, Any] | None:
    """Rank 0 reads, all others get it from rank 0, so that all ranks surely go on from the same step."""
    found: list[dict[str, Any] | None] = [None]
    if rank == 0 and (paths := sorted(directory.glob("step-*.pt"))):
        found = [torch.load(paths[-1], weights_only=True)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def train(options: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cycle = int(os.environ.get("NVRX_CYCLE") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    group_rank = int(os.environ.get("GROUP_RANK", "0"))
    directory: Path = options.checkpoint_dir
    directory.mkdir(parents=True, exist_ok=True)

    features, labels = make_data()
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step, last_loss = 0, float("nan")
    checkpoint = load_newest_checkpoint(directory, rank)
    if checkpoint is None:
        print(f"rank {rank} starting at step 0", flush=True)
    else:
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        step, last_loss = checkpoint["step"], checkpoint["loss"]
        print(f"rank {rank} resumed from step {step}", flush=True)

    with (directory / "history.jsonl").open("a") as history:
        while step < options.steps:
            mine = shard(step, rank, world_size)
            loss = nn.functional.cross_entropy(model(features[mine]), labels[mine])
            optimizer.zero_grad()
            loss.backward()  # DistributedDataParallel averages the gradients of all ranks here
            optimizer.step()
            step += 1
            mean_loss = loss.detach()
            dist.all_reduce(mean_loss)
            last_loss = mean_loss.item() / world_size

            if rank == 0:
                line = {"step": step, "loss": last_loss, "world_size": world_size, "cycle": cycle}
                history.write(json.dumps(line | {"group_rank": group_rank}) + "\n")
                history.flush()
                if step % options.print_every == 0 or step == options.steps:
                    print(f"step {step} loss {last_loss:.4f} world {world_size} cycle {cycle}", flush=True)
                if step % options.checkpoint_every == 0 or step == options.steps:
                    parts = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                    save_checkpoint(directory, parts | {"step": step, "loss": last_loss})
            time.sleep(options.step_time)
    dist.barrier()  # nobody reports success before the last checkpoint is written


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small model with DistributedDataParallel on CPU.")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--step-time", type=float, default=0.0, metavar="S", help="pause after each step")
    parser.add_argument("--print-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")  # finds RANK, WORLD_SIZE and where to meet in the environment
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
