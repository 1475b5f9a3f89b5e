"""The process in which answers are compared: one JSON object a line in, one a line out.

    in    {"truth", "answer", "question"}
    out   {"equal": true or false}
          {"equal": false, "why": sentence}     it takes more time or memory than an answer may
          {"unreadable": sentence}              the ground truth is no mathematics

The first line out is `{}`: the libraries are loaded, and their parser has built its tables.

Run with `python -m agentrl.mathematics.worker SECONDS`, of processor time that one comparison may
take: the load of the machine changes no result. After twice as many the kernel ends the process, in
case that it is in the middle of one endless operation.
"""

import json
import logging
import resource
import signal
import sys
from types import FrameType

from agentrl.mathematics.equality import is_equal
from agentrl.mathematics.expressions import TooLarge

MEMORY_BYTES = 4 << 30  # 9**9**9 would take all memory


class _OutOfTime(BaseException):
    """The time is used up. A `BaseException`, so that libraries do not catch it."""


def compare(truth: str, answer: str, question: str, seconds: float) -> dict[str, object]:
    """The reply to one request. Only for the main thread, because it uses signals."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + 2 * seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return {"equal": is_equal(truth, answer, question)}
    except _OutOfTime:
        why = f"takes more than {seconds:g} s of processor time to compare"
    except MemoryError:
        why = f"takes more than {MEMORY_BYTES >> 30} GB of memory to compare"
    except TooLarge as error:
        why = f"has {error}"
    except RecursionError:
        why = "is nested too deeply to compare"
    except ValueError as error:
        return {"unreadable": str(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"equal": False, "why": f"the answer {why}"}


def main() -> None:
    """Answer requests until standard input is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump at the processor-time limit
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal's: the process that started this ends it
    signal.signal(signal.SIGPROF, _stop)
    logging.disable(logging.CRITICAL)  # libraries log what they cannot parse
    is_equal(r"\frac{x^2+1}{\sqrt{2}}", r"\frac{\sin 3}{n!}-x(x+1)")
    print("{}", flush=True)
    seconds = float(sys.argv[1])
    for line in sys.stdin:
        reply = compare(**json.loads(line), seconds=seconds)
        print(json.dumps(reply), flush=True)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise _OutOfTime


if __name__ == "__main__":
    main()
