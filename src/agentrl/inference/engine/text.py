"""Text at the engine's edge: prompts to ids, outputs to text, stop strings.

The engine itself knows tokens only; a model folder without a tokenizer serves those.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Text:
    """The tokenizer of a model folder, which may have none."""

    def __init__(self, model_path: Path) -> None:
        self._tokenizer: PreTrainedTokenizerBase | None = None
        if any((model_path / name).is_file() for name in _TOKENIZER_FILES):
            self._tokenizer = AutoTokenizer.from_pretrained(model_path)

    @property
    def known(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    @cached_property
    def longest_token(self) -> int:
        """Number of characters that the longest token stands for, or more."""
        assert self._tokenizer is not None
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end-of-sequence id; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """The ids of a text prompt, with the special tokens that the tokenizer adds."""
        assert self._tokenizer is not None
        return list(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of output ids; empty without a tokenizer."""
        if self._tokenizer is None or not ids:
            return ""
        text = self._tokenizer.decode(
            list(ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text


@dataclass(frozen=True, slots=True)
class StopStrings:
    """The stop strings of one request, which are searched for after each token."""

    text: Text
    strings: tuple[str, ...]

    def match(self, output_ids: Sequence[int]) -> str | None:
        """The first stop string that the end of the output contains."""
        # A token stands for one byte at least, so a stop string of b bytes ends within b tokens.
        reach = max(len(string.encode()) for string in self.strings)
        tail = self.text.decode(output_ids[-reach:], skip_special_tokens=False)
        return next((string for string in self.strings if string in tail), None)

    def trim(self, text: str) -> str:
        """The text before the first stop string in it."""
        ends = [at for string in self.strings if (at := text.find(string)) >= 0]
        return text[: min(ends)] if ends else text
