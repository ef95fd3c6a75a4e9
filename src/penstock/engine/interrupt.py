"""An interrupt of the main thread, as by Ctrl-C: it also ends a sleep, or a wait for a socket.

Programs in the background ignore Ctrl-C, for that is how scripts start them. They go on to do so, but not to ignore
what is sent here.
"""

from __future__ import annotations

import signal
import threading

__all__ = ["Interrupt"]


class Interrupt:
    """Sent while the main thread is in a call, and heard there, unless the program has a handler of its own."""

    def __init__(self) -> None:
        self.sent = False
        self._handler = self._hear

    def listen(self) -> None:
        """A call begins."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and _in_main_thread():
            signal.signal(signal.SIGINT, self._handler)

    def end(self) -> None:
        """It is over, and nothing is sent any more."""
        if signal.getsignal(signal.SIGINT) is self._handler and _in_main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def heard_by(self, thread: int | None) -> bool:
        """Whether it would be."""
        handlers = (signal.default_int_handler, self._handler)
        main = thread == threading.main_thread().ident
        return main and signal.getsignal(signal.SIGINT) in handlers and hasattr(signal, "pthread_kill")

    def send(self) -> None:
        self.sent = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    def _hear(self, number: int, frame: object) -> None:
        if self.sent:
            raise KeyboardInterrupt


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
