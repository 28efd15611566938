"""Ctrl-C between two updates, so that what is saved is whole."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class Interrupted(Exception):
    """Ctrl-C was pressed, and training stands between two updates."""


def check_stop(stop: threading.Event | None) -> None:
    """Interrupted when `stop` is set; None: it never is."""
    if stop is not None and stop.is_set():
        raise Interrupted


@contextlib.contextmanager
def catching_interrupt(stop: threading.Event) -> Iterator[None]:
    """Within: a first Ctrl-C or SIGTERM only sets `stop`; a second one raises KeyboardInterrupt at once.

    Only the main thread hears signals: in another one nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(*_):
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
