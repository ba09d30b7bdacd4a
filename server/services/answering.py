"""What all services share: refusals become statuses, answers come in pages that fit a default client."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import grpc
from grpc_status import rpc_status

from nvrx.core.refused import Reason, Refused
from nvrx.errors import MAX_STATUS_TEXT, to_status

log = logging.getLogger("nvrx.coord")

MAX_PAGE_ROWS = 10_000
MAX_PAGE_BYTES = 3 * 1024 * 1024
"""A default client refuses answers above 4 MiB (rule H4)."""

Request = TypeVar("Request")
Response = TypeVar("Response")
Row = TypeVar("Row")
_BYTE_SIZE: Callable[[Any], int] = operator.methodcaller("ByteSize")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


async def refuse(context: Context, refused: Refused) -> None:
    """End the rpc with the refusal's status; one log line."""
    log.info("refused %s: %s", refused.reason.value, refused.message[:MAX_STATUS_TEXT])
    await context.abort_with_status(rpc_status.to_status(to_status(refused)))


def answering(
    method: Callable[[Any, Request, Context], Awaitable[Response]],
) -> Callable[[Any, Request, Context], Awaitable[Response]]:
    """Make a unary rpc answer a Refused with its status. No traceback ever reaches a client."""

    @functools.wraps(method)
    async def answer(self: Any, request: Request, context: Context) -> Response:
        try:
            return await method(self, request, context)
        except Refused as refused:
            await refuse(context, refused)
            raise AssertionError("unreachable: abort raises") from refused

    return answer


@dataclass(frozen=True)
class Page:
    """Which rows a request asks for."""

    begin: int
    size: int


def page_of(page_size: int, page_token: str) -> Page:
    """Read a request's page. Raises Refused for a size or token that is none."""
    if page_size < 0:
        raise Refused(
            Reason.INVALID_FIELD, f"page_size is {page_size}; give 0 (as many as fit) or more", {"field": "page_size"}
        )
    if page_token and not (page_token.isascii() and page_token.isdigit() and len(page_token) < 12):
        raise Refused(
            Reason.INVALID_FIELD,
            f"page_token {page_token[:64]!a} is none of ours; pass next_page_token as it came",
            {"field": "page_token"},
        )
    return Page(int(page_token or 0), min(page_size or MAX_PAGE_ROWS, MAX_PAGE_ROWS))


def fill(page: Page, rows: Iterable[Row], into: Any, size: Callable[[Any], int] = _BYTE_SIZE) -> str:
    """Append the page's rows to the repeated field `into`; the token of the next page, empty at the end.

    `rows` begins with the page's first row, `size` is how many bytes of a page one takes. A page ends at its size or at
    MAX_PAGE_BYTES.
    """
    used = 0
    for count, row in enumerate(rows):
        used += size(row)
        if count and (count == page.size or used > MAX_PAGE_BYTES):
            return str(page.begin + count)
        into.append(row)
    return ""


async def answer_later(self: Any, request: Any, context: Context) -> Any:
    """The answer of an rpc that is part of the contract but not of this version."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this version of nvrx-coord does not have this rpc yet")
