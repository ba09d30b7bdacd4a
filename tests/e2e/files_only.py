"""Runs a command with host names from files only, where this process may arrange that: `files_only FOLDER COMMAND...`.

torch's store looks up the name of every peer that connects; with a slow resolver a test would time that.
"""

import os
import sys
from pathlib import Path

from bench.hostnames import use_files_only

if __name__ == "__main__":
    why_not = use_files_only(Path(sys.argv[1]))
    if why_not is not None:
        print(f"host names are looked up as usual: {why_not}", file=sys.stderr)
    os.execvp(sys.argv[2], sys.argv[2:])
