"""Digests of a model folder's content.

Equal digests show that a path still holds the model that a run began with, also on another machine.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from agentrl.file_digest import Digest

_TOKENS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "spiece.model",
    "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_SAMPLE = 1 << 20  # bytes read at the beginning, middle and end of each weight file


def tokenizer_digest(folder: Path) -> str | None:
    """Digest of the tokenizer's files and chat template; None if the folder has none."""
    files = [folder / name for name in _TOKENS if (folder / name).is_file()]
    return _digest(_named(files)) if files else None


def model_digest(folder: Path) -> str | None:
    """Digest of a model's config, tokenizer and weights; None without a config.json.

    Three pieces of each weight file are read, and its name and size.
    """
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
