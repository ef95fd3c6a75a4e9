"""The process that ``penstock run`` starts for each rank. It runs the user's script in the same way as ``python``.

    python run_worker.py train.py …
    python run_worker.py -m package.train …

It is started by its path and imports only the standard library, so that no other module is imported before the script
begins. An uncaught exception is not printed but recorded for ``penstock run``, which prints the first one of all ranks.
The process ends when the process of the launcher has ended.
"""

from __future__ import annotations

import contextlib
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


def main() -> None:
    sys.excepthook = _record_exception
    faulthandler.enable()
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    sys.argv.pop(0)
    try:
        if sys.argv[0] == "-m":
            sys.argv.pop(0)
            sys.path[0] = os.getcwd()
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            is_code = isinstance(error.code, int)
            _record("" if is_code else str(error.code), code=error.code if is_code else 1)
        raise


def _record_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    errors = sys.modules.get("penstock.errors")
    if errors is not None and isinstance(error, errors.PipelineError) and error.rank is not None:
        # The error is the same on every rank, and its text has the location and the traceback of the failure.
        _record("".join(traceback.format_exception_only(error)), rank=error.rank)
    elif not issubclass(kind, KeyboardInterrupt):
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next  # skip the frames that started the script
        _record("".join(traceback.format_exception(kind, error, trace)))


def _record(text: str, **more: Any) -> None:
    """Write the error of this process to the file of torch's launcher, in its format."""
    now = time.time()
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": int(now)}}
    record = {"message": message, "time": now, **more}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(record), encoding="utf-8")


def _exit_with_parent(parent: int) -> None:
    """End this process when the launcher has ended, possibly before this function was called."""
    launcher = int(os.environ.get("PENSTOCK_LAUNCHER", parent))
    with contextlib.suppress(ProcessLookupError):
        while os.getppid() == parent:
            os.kill(launcher, 0)
            time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
