"""Scorers that compare two texts: pure functions, 0 to 1.

exact_match   the same text, but for case, white space and the form of Unicode
contains      the right answer's words stand in the answer, in one piece
f1            how many words they share
"""

import re
import unicodedata
from collections import Counter

_ARTICLES = frozenset({"a", "an", "the"})
# A word is a run of letters and digits, except in scripts that put no spaces between words.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
# A number with its minus sign and its decimal points or commas.
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:[.,]\d+)*")


def exact_match(model_answer: str, ground_truth: str) -> float:
    """1.0 if both texts are equal apart from case, white space and Unicode form (NFC), else 0.0."""
    return float(_normalised(model_answer) == _normalised(ground_truth))


def contains(model_answer: str, ground_truth: str) -> float:
    """1.0 if the answer contains the words of the right answer in sequence, else 0.0.

    Whole words are compared: 42 does not contain 4. A right answer without words must match
    exactly.
    """
    answer, truth = words(model_answer), words(ground_truth)
    if not truth:
        return exact_match(model_answer, ground_truth)
    starts = range(len(answer) - len(truth) + 1)
    return float(any(answer[start : start + len(truth)] == truth for start in starts))


def f1(model_answer: str, ground_truth: str) -> float:
    """F1 = 2 P R / (P + R) over the bags of words of both (SQuAD, arXiv 1606.05250, section 6.1).

    Articles, case and punctuation do not count.
    """
    answer, truth = Counter(words(model_answer)), Counter(words(ground_truth))
    if not answer or not truth:
        return exact_match(model_answer, ground_truth)
    shared = (answer & truth).total()
    return 2 * shared / (answer.total() + truth.total())


def words(text: str) -> list[str]:
    """The words of a text without case, punctuation and articles; numbers stay whole."""
    text = unicodedata.normalize("NFKC", text).casefold()
    found: list[str] = []
    end = 0
    for number in _NUMBER.finditer(text):
        found += _WORD.findall(text[end : number.start()])
        found.append(number.group().replace(",", ""))
        end = number.end()
    found += _WORD.findall(text[end:])
    without = [word for word in found if word not in _ARTICLES]
    return without or found  # keep the articles if there is nothing else


def _normalised(text: str) -> str:
    text = unicodedata.normalize("NFC", " ".join(text.split())).casefold()
    return unicodedata.normalize("NFC", text)  # case folding may decompose letters
