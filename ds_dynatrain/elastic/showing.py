"""Views of a worker from inside, which it sends on request: the last lines of its log, and where its threads are."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from itertools import islice
from traceback import walk_stack
from typing import Any

from ds_dynatrain.elastic.messages import LONGEST_LINE, LONGEST_STACKS, MOST_LINES, Shown, clipped

MOST_FRAMES = 100
"""The maximum number of frames of a thread that are shown, the innermost first."""


class LastLines:
    """The last lines of all of this process's loggers.

    Lines are kept where records are made. A handler would change the meaning of the script's `logging.basicConfig`,
    which does nothing if there is one.
    """

    def __init__(self) -> None:
        self._lines = deque[str](maxlen=MOST_LINES)
        self._make = logging.getLogRecordFactory()
        self._is_listening = False

    def listen(self) -> None:
        """Keep lines from now on; later calls do nothing."""
        if not self._is_listening:
            self._is_listening, self._make = True, logging.getLogRecordFactory()
            logging.setLogRecordFactory(self._made)

    def read(self) -> tuple[str, ...]:
        """Return the lines, oldest first."""
        return tuple(self._lines.copy())

    def _made(self, *arguments: Any, **more: Any) -> logging.LogRecord:
        """Make a record, and keep its text rather than its arguments, which may hold tensors."""
        record = self._make(*arguments, **more)
        try:
            text = record.getMessage()
        except Exception:  # the handlers report it
            text = "a line with a wrong format"
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        self._lines.append(_sendable(f"{at} {record.levelname} {record.name}: {text}", LONGEST_LINE))
        return record


LAST_LINES = LastLines()
"""The last log lines of this process."""


def shown() -> Shown:
    """Return what this process is doing. May be called on any thread, and opens no file."""
    return Shown(lines=LAST_LINES.read(), stacks=_sendable(stacks(), LONGEST_STACKS))


def stacks() -> str:
    """Return the stacks of all threads, the main thread first, each with its innermost frame first.

    Unlike `faulthandler`, this needs no file to write to, names the threads, and puts the one that matters first.
    """
    names = {each.ident: each.name for each in threading.enumerate()}
    main = threading.main_thread().ident
    lines = list[str]()
    for ident, frame in sorted(sys._current_frames().items(), key=lambda each: each[0] != main):
        lines.append(f"thread {names.get(ident, ident)}:")
        for inner, line in islice(walk_stack(frame), MOST_FRAMES):
            lines.append(f"  {inner.f_code.co_filename}:{line}, in {inner.f_code.co_name}")
    return "\n".join(lines)


def _sendable(text: str, limit: int) -> str:
    """Return a text cut to `limit` characters, with a question mark for each character that UTF-8 does not have."""
    return clipped(text, limit).encode(errors="replace").decode()
