"""Which signals end a process in order, and which of them ask for haste."""

import signal
import subprocess
import sys

from agentrl.stop_signals import STOP_SIGNALS, StopRequest, stop_signals


def requests(*came: tuple[float, signal.Signals]) -> list[bool]:
    """What each of the signals asks for that come at these seconds."""
    times = iter([at for at, _ in came])
    request = StopRequest(clock=lambda: next(times))
    asked = [request.take(number) for _, number in came]
    assert request.first == came[0][1]
    return asked


def test_the_same_signal_again_asks_to_stop_at_once() -> None:
    assert requests((0, signal.SIGINT), (2, signal.SIGINT)) == [False, True]


def test_a_job_whose_end_sends_a_signal_twice_at_once_asks_once() -> None:
    assert requests((0, signal.SIGTERM), (0.1, signal.SIGTERM)) == [False, False]


def test_slurms_warning_and_the_end_that_follows_it_ask_for_no_haste() -> None:
    came = [(0, signal.SIGUSR1), (60, signal.SIGUSR1), (90, signal.SIGTERM)]
    assert requests(*came) == [False, False, False]


def test_what_a_process_was_started_to_ignore_it_goes_on_to_ignore() -> None:
    ignored = {number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_IGN}
    assert set(stop_signals()) == set(STOP_SIGNALS) - ignored
    code = "from agentrl.stop_signals import stop_signals; print(*[n.name for n in stop_signals()])"
    shell = ["sh", "-c", 'trap "" HUP USR1; exec "$0" -c "$1"', sys.executable, code]
    heard = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.split()
    assert heard == ["SIGINT", "SIGTERM", "SIGUSR2"]
