"""Writes W_MEGABYTES to standard output and as much to standard error, in turns, then exits 0."""

import os

BLOCK = 64 * 1024


def main() -> None:
    for index in range(int(os.environ["W_MEGABYTES"]) * 1024 * 1024 // BLOCK):
        for fd in (1, 2):
            block = (b"%08d" % index) * (BLOCK // 8)
            while block:
                block = block[os.write(fd, block) :]


if __name__ == "__main__":
    main()
