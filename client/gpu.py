"""What this host's GPUs say of themselves. Without a GPU, or without a way to ask it: None."""

from __future__ import annotations


def cluster_uuid() -> str | None:
    """The UUID of the NVLink cluster that this host's GPUs belong to; None where none is known (rule B7).

    GPUs are not asked in this version.
    """
    return None
