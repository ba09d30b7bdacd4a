"""Real torch: gloo over loopback, all_reduce of each rank plus one, then whatever the test says."""

import os

from .talk import Line, obey


def main() -> None:
    line = Line()
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="env://")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    line.say("reduced", total=int(total), rank=dist.get_rank())
    obey(line)
    os._exit(0)


if __name__ == "__main__":
    main()
