"""Ctrl-C and SIGTERM that end a process soon, whatever it is doing.

Python hands a signal to the main thread between two instructions of its own, and XLA compiles or computes for minutes
without one; a KeyboardInterrupt that is raised in a callback of JAX's is lost. So another thread, which is told of
SIGINT at once, ends the process, and nothing is raised.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn, Self

EXIT_CODE = 130  # What a shell reports for a program that SIGINT ended.
TERMINATED_CODE = 143  # And SIGTERM.
GRACE_S = 3.0  # To end in good order, for what has deferred the end.

_STOP = 0  # No signal has this number.
_SHOW_CURSOR = b"\x1b[?25h\n"


class Watch:
    """While it is entered, SIGINT ends the process with ``EXIT_CODE`` and SIGTERM with ``TERMINATED_CODE``, unless that
    is :meth:`deferred`. ``exit_code`` is that of the last one.

    Files are safe that are written by one call, or renamed when they are whole.

    Example:
      >>> with Watch() as watch, watch.deferred():
      ...     watch.received
      False
    """

    def __init__(self) -> None:
        self.received = False
        self.exit_code = EXIT_CODE
        self._deferred = False

    def __enter__(self) -> Self:
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._previous_sender = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        numbers = signal.SIGINT, signal.SIGTERM
        self._previous_handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_sender)
        os.write(self._sender, bytes([_STOP]))
        self._thread.join()
        os.close(self._sender)
        os.close(self._receiver)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """The first signal in the body sets ``received``, and a second one ends the process. SIGINT leaves it
        ``GRACE_S``; who sends SIGTERM has a limit of their own.
        """
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _run(self) -> None:
        end = None
        while True:
            left = None if end is None else max(0, end - time.monotonic())
            ready, _, _ = select.select([self._receiver], [], [], left)
            number = os.read(self._receiver, 1)[0] if ready else signal.SIGINT
            if number == _STOP:
                return
            if number in self._previous_handlers:
                self.exit_code = EXIT_CODE if number == signal.SIGINT else TERMINATED_CODE
                if self.received or not self._deferred:
                    _end(self.exit_code)
                self.received, end = True, time.monotonic() + GRACE_S if number == signal.SIGINT else None


def leave(exit_code: int) -> NoReturn:
    """Ends the process; after a signal at once, as an interpreter's own end waits for what devices still compute."""
    if exit_code in (EXIT_CODE, TERMINATED_CODE):
        for stream in sys.stdout, sys.stderr:
            stream.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def _end(exit_code: int) -> NoReturn:
    # Not through Python's streams: whoever holds their locks may be what does not end.
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, _SHOW_CURSOR)
        os.write(2, b"interrupted: what was written so far is kept\n")
    os._exit(exit_code)
