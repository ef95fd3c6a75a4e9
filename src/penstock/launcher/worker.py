"""What ``penstock run`` starts for every rank: the user's script, as Python itself would run it.

    python worker.py train.py …
    python worker.py -m package.train …

It is started by its path and imports nothing but Python's own, so that nothing is there before the script begins. An
exception that ends the script is not printed here, p times over, but written down for ``penstock run``, which shows the
first one of all ranks. And a rank whose launcher has gone, by whatever end, goes too.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Run the script that the arguments name."""
    sys.excepthook = _uncaught
    faulthandler.enable()
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    try:
        _run(sys.argv[1:])
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            number = isinstance(leaving.code, int)
            _record("" if number else str(leaving.code), code=leaving.code if number else 1)
        raise


def _run(arguments: list[str]) -> None:
    module = arguments[0] == "-m"
    sys.argv = arguments[module:]
    if module:
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    errors = sys.modules.get("penstock.errors")
    if errors is not None and isinstance(error, errors.PipelineError) and error.rank is not None:
        # The same on every rank, and it says all: where it happened, and with which traceback there.
        _record("".join(traceback.format_exception_only(error)), rank=error.rank)
    elif not issubclass(kind, KeyboardInterrupt):
        _record("".join(traceback.format_exception(kind, error, _of_script(trace))))


def _record(told: str, **more: Any) -> None:
    """Write down why this process ends, where torch's launcher looks for it and in its words."""
    now = time.time()
    message = {"message": told, "extraInfo": {"py_callstack": told, "timestamp": int(now)}}
    record = {"message": message, "time": now, **more}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(record), encoding="utf-8")


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script on: nobody wants to read how it was started."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _follow(launcher: int) -> None:
    """Whatever ends the process that started this one ends this one too."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
