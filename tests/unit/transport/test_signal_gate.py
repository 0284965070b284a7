import os
import signal
import threading
import timeit

import pytest

from waiting import scaled, wait_until
from zbus.transport.interrupts import GATED_SIGNALS, gate


@pytest.fixture(autouse=True)
def _handlers():
    """Put back every handler a test installs."""
    gate.release()
    before = {number: signal.getsignal(number) for number in GATED_SIGNALS}
    yield
    gate.release()
    for number, handler in before.items():
        signal.signal(number, handler)


def strike(*numbers: int) -> None:
    """Send signals to this process."""
    for number in numbers:
        os.kill(os.getpid(), number)


def in_section(*numbers: int, then: Exception | None = None) -> None:
    """Be struck inside a section, reach its end, and leave it."""
    with gate:
        strike(*numbers)
        if then is not None:
            raise then
        REACHED.append(numbers)


REACHED: list[tuple[int, ...]] = []


def test_a_handler_runs_at_once_outside_a_section():
    """Without a section the gate changes nothing."""
    calls = []
    signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    with gate:
        pass
    strike(signal.SIGUSR1)
    assert calls == [signal.SIGUSR1]


def test_a_handler_that_falls_due_in_a_section_runs_when_the_outermost_ends():
    """Nested sections count; the handler runs once, after the last."""
    calls = []
    signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    with gate:
        with gate:
            strike(signal.SIGUSR1)
            assert calls == []
        assert gate.closed
        assert calls == []
    assert calls == [signal.SIGUSR1]
    assert not gate.closed


def test_ctrl_c_in_a_section_is_raised_where_the_section_ends():
    """KeyboardInterrupt is late, never lost."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    REACHED.clear()
    with pytest.raises(KeyboardInterrupt):
        in_section(signal.SIGINT)
    assert REACHED


def test_handlers_run_in_the_order_in_which_they_fell_due():
    """The gate keeps order between signals."""
    calls = []
    for number in GATED_SIGNALS:
        signal.signal(number, lambda number, frame: calls.append(number))
    order = [signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGALRM]
    with gate:
        for number in order:
            strike(number)
    assert calls == order


def test_a_handler_that_raises_keeps_no_other_from_running():
    """All handlers run; the exception still leaves."""
    calls = []

    def raising(number, frame):
        calls.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, raising)
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    with pytest.raises(KeyboardInterrupt):
        in_section(signal.SIGINT, signal.SIGTERM)
    assert calls == [signal.SIGINT, signal.SIGTERM]
    with gate:
        pass


def test_an_exception_of_the_section_is_kept_as_context():
    """The interrupt does not hide what went wrong before it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt) as caught:
        in_section(signal.SIGINT, then=ValueError("inner"))
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_installed_after_the_first_section_is_deferred_too():
    """The gate looks at what is installed at each entry."""
    calls = []
    with gate:
        pass
    signal.signal(signal.SIGUSR2, lambda number, frame: calls.append("new"))
    with gate:
        strike(signal.SIGUSR2)
        assert calls == []
    assert calls == ["new"]


def test_saving_and_restoring_handlers_around_sections_does_not_pile_up_wrappers():
    """A program may save what it sees and put it back any number of times."""
    calls = []

    def own(number, frame):
        calls.append(number)

    signal.signal(signal.SIGUSR1, own)
    for _ in range(50):
        with gate:
            pass
        saved = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        with gate:
            pass
        signal.signal(signal.SIGUSR1, saved)
    assert gate.original(signal.SIGUSR1) is own
    strike(signal.SIGUSR1)
    assert calls == [signal.SIGUSR1]


def test_default_and_ignored_dispositions_are_left_alone():
    """Only Python handlers are wrapped: SIG_DFL and SIG_IGN need no deferring."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with gate:
        strike(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_release_puts_the_programs_handlers_back():
    """After release the program sees its own functions again."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with gate:
        pass
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    gate.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with gate:
        pass
    assert gate.original(signal.SIGINT) is signal.default_int_handler


def test_another_threads_section_defers_nothing_on_the_main_thread():
    """Handlers run on the main thread only, so sections elsewhere are no-ops."""
    calls = []
    signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with gate:
            entered.set()
            leave.wait(scaled(10))

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(scaled(10))
    try:
        assert not gate.closed
        strike(signal.SIGUSR1)
        wait_until(lambda: calls, what="the handler")
    finally:
        leave.set()
        thread.join()


def test_a_forked_child_starts_outside_any_section():
    """A fork inside a section does not leave the child deaf to signals."""
    signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(7))
    with gate:
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_a_section_costs_little():
    """A round trip enters several: far below a microsecond each on an idle machine."""

    def once():
        with gate:
            pass

    best = min(timeit.repeat(once, number=10_000, repeat=7)) / 10_000
    assert best < scaled(3e-6)
