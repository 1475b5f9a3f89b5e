"""The content of a model's folder as a short text, equal for equal content.

It tells whether a path holds what a run began with, wherever that is now. None if there is nothing
to read.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from agentrl.file_digest import Digest

_TOKENS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "spiece.model",
    "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_SAMPLE = 1 << 20  # bytes at the beginning, in the middle and at the end of a file of weights


def tokenizer_digest(folder: Path) -> str | None:
    """Of what makes text tokens in a model's folder, its chat template included."""
    files = [folder / name for name in _TOKENS if (folder / name).is_file()]
    return _digest(_named(files)) if files else None


def model_digest(folder: Path) -> str | None:
    """Of a model's configuration, tokenizer and weights, of whose files three pieces are read."""
    if not (folder / "config.json").is_file():
        return None
    weights = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern))
    parts = [(folder / "config.json").read_bytes(), (tokenizer_digest(folder) or "").encode()]
    return _digest([*parts, *(piece for file in weights for piece in _pieces(file))])


def _named(files: Iterable[Path]) -> Iterator[bytes]:
    for file in files:
        yield file.name.encode()
        yield file.read_bytes()


def _pieces(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    yield f"{file.name} {size}".encode()
    with file.open("rb") as opened:
        for start in sorted({0, max(0, (size - _SAMPLE) // 2), max(0, size - _SAMPLE)}):
            opened.seek(start)
            yield opened.read(_SAMPLE)


def _digest(parts: Iterable[bytes]) -> str:
    digest = Digest()
    for part in parts:
        digest.part(part)
    return digest.text()
