"""Limits the size of answers to aiohttp clients, so that none can exhaust a process's memory."""

import aiohttp


class AnswerTooLarge(Exception):
    """An answer exceeds the limit. The part that was read is dropped."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the answer has more than {limit} bytes and was not read further")


async def read_limited(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Read a body of at most `limit` bytes after decompression.

    Raises `AnswerTooLarge` and closes the connection if it is longer.
    """
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > limit:
            response.close()
            raise AnswerTooLarge(limit)
    return bytes(body)
