"""Real torch: an all_reduce, and what each library draws when nobody gave it a seed."""

import os
import random
import sys

from .talk import Line, obey


def main() -> None:
    loaded = "torch" in sys.modules
    line = Line()
    import numpy
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="env://")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    drawn = [random.random(), float(numpy.random.random()), float(torch.rand(1)), torch.initial_seed()]
    line.say("reduced", total=int(total), rank=dist.get_rank(), loaded=loaded, drawn=[str(one) for one in drawn])
    obey(line)
    os._exit(0)


if __name__ == "__main__":
    main()
