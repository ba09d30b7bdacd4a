"""Keeps multinode PyTorch training alive. Programs use `nvrx.launch` and `nvrx.worker`; all else is the product's own.

Importing this costs nothing: workers do it too.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvrx.client.launch import LaunchFailed, launch

__all__ = ["LaunchFailed", "launch"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from nvrx.client import launch as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
