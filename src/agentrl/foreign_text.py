"""What an object of a user's own says of itself, whatever its class does: these never raise.

An exception of an agent, a scorer or a library may have a `__str__` that fails. What tells of it
must not fail with it: the error would be lost, and with it which attempt it was.
"""

import re
import reprlib

# What moves a terminal's cursor, colours, renames or reorders: C0 and C1 but for tab and line feed,
# marks of writing direction, separators of lines, and surrogates, which cannot be written at all.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def text_of(value: object) -> str:
    """`str(value)`, or a sentence in its place."""
    try:
        # A subclass of str may do as it likes in any of its methods.
        return str.__str__(str(value))
    except BaseException as error:  # also sys.exit
        return f"a {type(value).__name__} whose text raises {type(error).__name__}"


def shown(value: object) -> str:
    """`repr(value)` as an error shows it: one short line."""
    try:
        return str.__str__(reprlib.repr(value))
    except BaseException as error:  # also sys.exit
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"


def error_line(error: BaseException) -> str:
    """An exception as its type and what it says, as the last line of a traceback has them."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def one_line(text: str) -> str:
    """A text as a terminal shows it: without line breaks, and with control codes spelled out."""
    joined = " ".join(text.split())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in joined)


def utf8_text(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot encode, replaced."""
    if text.isascii():  # known without a look at it
        return text
    return text.encode("utf-8", "replace").decode("utf-8")


def visible(text: str) -> str:
    """A text whose control characters are spelled out, so that printing it can do nothing else."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def visible_json(text: str) -> str:
    """JSON that can be printed likewise: it says the same, with these characters escaped."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
