"""JSON of the control endpoints: checked bodies, and answers and refusals in SGLang's format."""

import orjson
from aiohttp import web


def answer(value: object, status: int = 200) -> web.Response:
    """Return a JSON answer."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def done(success: bool, message: str, **more: object) -> web.Response:
    """Return SGLang's answer for success (status 200) or failure (status 400)."""
    return answer({"success": success, "message": message, **more}, 200 if success else 400)


class ControlBody:
    """The JSON object of a control request. A field of another type raises HTTPBadRequest."""

    def __init__(self, fields: dict[str, object]) -> None:
        self._fields = fields

    @classmethod
    async def read(cls, request: web.Request) -> "ControlBody":
        """Read the body. Raises HTTPBadRequest if it is empty or not a JSON object."""
        try:
            body = orjson.loads(await request.read())
        except orjson.JSONDecodeError as error:
            raise bad_request(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise bad_request("the body must be a JSON object")
        return cls(body)

    def text(self, name: str) -> str:
        """A required string."""
        value = self._fields.get(name)
        if not isinstance(value, str):
            raise bad_request(f"{name} is required and must be a string")
        return value

    def optional_text(self, name: str) -> str | None:
        """A string, or None."""
        return None if self._fields.get(name) is None else self.text(name)

    def integer(self, name: str) -> int:
        """A required integer."""
        value = self._fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_request(f"{name} is required and must be an integer")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Whether it is given as true."""
        return bool(self._fields.get(name, default))

    def texts(self, name: str) -> list[str]:
        """A required list of strings."""
        value = self._fields.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise bad_request(f"{name} is required and must be a list of strings")
        return value

    def shapes(self, name: str) -> list[list[int]]:
        """A required list of tensor shapes."""
        value = self._fields.get(name)
        if not isinstance(value, list) or not all(
            isinstance(shape, list) and all(isinstance(size, int) for size in shape)
            for shape in value
        ):
            raise bad_request(f"{name} is required and must be a list of lists of integers")
        return value


def bad_request(problem: str) -> web.HTTPBadRequest:
    """Return SGLang's refusal of a body, status 400."""
    return web.HTTPBadRequest(
        body=orjson.dumps(
            {
                "object": "error",
                "message": f"1 validation error: {problem}",
                "type": "Bad Request",
                "param": None,
                "code": 400,
            }
        ),
        content_type="application/json",
    )
