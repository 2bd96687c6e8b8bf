"""Work that ends when the client has gone."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

Result = TypeVar("Result")


async def until_disconnect(receive: Receive, work: Coroutine[object, object, Result]) -> Result:
    """Does `work`, or cancels it when the client disconnects; the request's body must have been read.

    Cancelling runs the work's `finally` clauses to their end before this returns, so that whatever it
    asked of the engine has been aborted by then.

    Raises:
        ClientDisconnect: The client has gone.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        watching.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
