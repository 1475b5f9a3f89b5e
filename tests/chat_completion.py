"""The reply of an OpenAI-compatible chat endpoint, for servers of tests."""

from typing import Any


def chat_completion(model: str, content: Any) -> dict[str, Any]:
    """The body of the answer in which `model` says `content`."""
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return {
        "id": "1", "object": "chat.completion", "created": 0, "model": model, "choices": [choice],
    }  # fmt: skip
