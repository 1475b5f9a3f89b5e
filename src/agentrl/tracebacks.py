"""Logs one traceback for each kind of error, because the same error often occurs many times."""

import logging
import os
from collections import Counter

from agentrl.foreign_text import text_of, visible


def log_to_stderr(form: str, level: int = logging.INFO) -> None:
    """Set up the log of a process: lines of `form`, one traceback for each kind of error.

    The variable LOG_LEVEL sets the level of AgentRL's own lines, except where only warnings are
    wanted.
    """
    to_stderr = logging.StreamHandler()
    to_stderr.setFormatter(_Visible(form))
    logging.basicConfig(level=level, handlers=[to_stderr])
    name = os.environ.get("LOG_LEVEL", "").strip().upper()
    if level == logging.INFO and name in logging.getLevelNamesMapping():
        logging.getLogger("agentrl").setLevel(name)
    for handler in logging.getLogger().handlers:
        if not any(isinstance(known, OneTraceback) for known in handler.filters):
            handler.addFilter(OneTraceback())


class _Visible(logging.Formatter):
    """Spells out control characters: an error may quote what a model or a server said."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class OneTraceback(logging.Filter):
    """A filter for handlers that drops repeated tracebacks of one kind.

    A kind is the type of the error and the line that raised it. The message stays, with the number
    of errors of its kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: Counter[tuple[type[BaseException], str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop a repeated traceback. Every record passes."""
        if not record.exc_info or record.exc_info[1] is None:
            return True
        error, trace = record.exc_info[1], record.exc_info[1].__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = (trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace else ("", 0)
        kind = (type(error), *place)
        self._seen[kind] += 1
        if self._seen[kind] > 1:
            message = " ".join(_message(record).split())
            record.msg = f"{message} (no. {self._seen[kind]} of its kind, see the first above)"
            record.args = None
            record.exc_info = record.exc_text = None
        return True


def _message(record: logging.LogRecord) -> str:
    """What a record says. Its arguments may be an exception that cannot be told, or not fit: that
    must not fail in the code that logs."""
    try:
        return record.getMessage()
    except Exception as error:
        return f"{text_of(record.msg)} (its arguments raise {type(error).__name__})"
