"""Information about a worker that it sends on request: the last lines of its log, and the stacks of its threads."""

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
    """The last lines logged in this process, by any logger.

    Lines are captured when log records are created. A handler would change the effect of the script's
    `logging.basicConfig`, which does nothing if there is a handler.
    """

    def __init__(self) -> None:
        self._lines = deque[str](maxlen=MOST_LINES)
        self._make = logging.getLogRecordFactory()
        self._is_listening = False

    def listen(self) -> None:
        """Capture lines from now on; later calls do nothing."""
        if not self._is_listening:
            self._is_listening, self._make = True, logging.getLogRecordFactory()
            logging.setLogRecordFactory(self._made)

    def read(self) -> tuple[str, ...]:
        """Return the captured lines, oldest first."""
        return tuple(self._lines.copy())

    def _made(self, *arguments: Any, **more: Any) -> logging.LogRecord:
        """Create a log record, and keep its text instead of its arguments, which may refer to tensors."""
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
    """Return what this process is doing: its last log lines and its stacks. May be called on any thread; opens no
    file."""
    return Shown(lines=LAST_LINES.read(), stacks=_sendable(stacks(), LONGEST_STACKS))


def stacks() -> str:
    """Return the stacks of all threads, the main thread first, each with its innermost frame first.

    Unlike `faulthandler`, this needs no file to write to, names the threads, and puts the most important thread first.
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
    """Return a text truncated to `limit` characters, with a question mark for each character that UTF-8 cannot
    encode."""
    return clipped(text, limit).encode(errors="replace").decode()
