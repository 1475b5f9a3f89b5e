"""Answers of services, read up to a size: none of them may take the memory of a process."""

import aiohttp


class AnswerTooLarge(Exception):
    """An answer is larger than it may be; what came of it is not kept."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the answer has more than {limit} bytes and was not read further")


async def read_limited(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body, of at most `limit` bytes after decompression. Raises `AnswerTooLarge`, and then the
    connection is closed."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > limit:
            response.close()
            raise AnswerTooLarge(limit)
    return bytes(body)
