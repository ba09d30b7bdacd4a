"""What both command lines share: options that have an environment variable, errors of one line, exit codes.

Built on click; knows neither coordinator nor agent.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from nvrx.core.endpoint import HostPort, parse_endpoint
from nvrx.core.shape import NodeCounts, parse_nnodes
from nvrx.logs import one_line
from nvrx.token import TokenError, read_token

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

HELP_SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    # --nproc_per_node is --nproc-per-node: people come with torchrun's spelling.
    "token_normalize_func": lambda token: token.replace("_", "-"),
}


class Failed(Exception):
    """Ends a command with one line on standard error and an exit code."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def option(name: str, **settings: Any) -> Callable[[Decorated], Decorated]:
    """A click option `--some-name`, also from NVRX_SOME_NAME; the command line wins. `--yes/--no` share one name."""
    bare = name.partition("/")[0].removeprefix("--").replace("-", "_")
    settings.setdefault("envvar", f"NVRX_{bare.upper()}")
    return click.option(name, bare, **settings)


def token_in(path: Path | None) -> str | None:
    """The token of `--token-file`; None where none was given. Raises Failed with one line."""
    try:
        return read_token(path) if path is not None else None
    except TokenError as error:
        raise Failed(str(error), EXIT_USAGE) from error


class EndpointType(click.ParamType[HostPort]):
    """HOST:PORT, [IPV6]:PORT."""

    name = "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> HostPort:
        if isinstance(value, HostPort):
            return value
        try:
            return parse_endpoint(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class EndpointsType(click.ParamType[tuple[HostPort, ...]]):
    """HOST:PORT[,HOST:PORT...]."""

    name = "HOST:PORT[,...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[HostPort, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(EndpointType().convert(one.strip(), param, ctx) for one in value.split(","))


class NnodesType(click.ParamType[NodeCounts]):
    """MIN:MAX, or N."""

    name = "MIN:MAX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> NodeCounts:
        if isinstance(value, NodeCounts):
            return value
        try:
            return parse_nnodes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Seconds(click.ParamType[float]):
    """A length of time in seconds, not negative."""

    name = "SECONDS"

    def __init__(self, least: float = 0.0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        if not self._least <= number < 1e9:
            self.fail(f"{value!r} is not between {self._least:g} and 1e9 seconds", param, ctx)
        return number


_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


class Size(click.ParamType[int]):
    """A number of bytes, or of KiB, MiB, GiB: 65536, 64K, 64M, 1G."""

    name = "BYTES"

    def __init__(self, least: int = 0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"([0-9]{1,18})([KMG]?)(?:i?B)?", str(value).strip(), re.IGNORECASE | re.ASCII)
        if found is None:
            self.fail(f"{value!r} is not a size, as 65536, 64K, 64M or 1G", param, ctx)
        size = int(found[1]) * _UNITS[found[2].upper()]
        if size < self._least:
            self.fail(f"{value!r} is less than {self._least} bytes", param, ctx)
        return size


def run(command: click.Command, program: str, arguments: Sequence[str], **extra: Any) -> int:
    """Run a command; the exit code. Errors are one line on standard error, never a traceback or a usage block."""
    try:
        result = command.main(args=list(arguments), prog_name=program, standalone_mode=False, **extra)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return EXIT_USAGE
    except click.ClickException as error:
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx is not None else program
        print(f"{path}: {one_line(_from_where(error) + error.format_message())}", file=sys.stderr)
        return EXIT_USAGE
    except Failed as error:
        print(f"{program}: {one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone, as `| head` does: that is no failure of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    return result if isinstance(result, int) else EXIT_OK


def _from_where(error: click.ClickException) -> str:
    """Names the variable that a bad value came from: click's own text names the option only."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None:
        return ""
    source = error.ctx.get_parameter_source(error.param.name or "")
    return f"{error.param.envvar}: " if source is click.core.ParameterSource.ENVIRONMENT else ""


def leave(exit_code: int) -> NoReturn:
    """End the process at once, its output written.

    What the interpreter and gRPC's threads do on their way out is of no use to us, and can print or hang.
    """
    if sys.stdout is not None:  # as it is where the process was started with its output closed
        with contextlib.suppress(OSError):
            sys.stdout.flush()
    os._exit(exit_code)


def open_standard_streams() -> None:
    """Give descriptors 0 to 2 a place where they are closed: else a socket gets such a number, and our log with it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def program_version() -> str:
    """The version that is installed; told to the other side and shown to people."""
    try:
        return version("nvrx")
    except PackageNotFoundError:
        return "0+unknown"
