"""Token files (rule J2). A token is never put into a message, a log or an environment."""

from __future__ import annotations

from pathlib import Path

MIN_LENGTH = 8
MAX_LENGTH = 4096


class TokenError(ValueError):
    """A token file that cannot be used; the message is one line."""


def read_token(path: Path) -> str:
    """The token in a file: one word of printable ASCII. Raises TokenError."""
    try:
        token = path.read_text("ascii").strip()
    except OSError as error:
        raise TokenError(f"cannot read the token file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TokenError(f"the token file {path} has characters that are not ASCII") from error
    if not token.isprintable() or " " in token or not MIN_LENGTH <= len(token) <= MAX_LENGTH:
        raise TokenError(f"the token file {path} must hold one word of {MIN_LENGTH} to {MAX_LENGTH} characters")
    return token
