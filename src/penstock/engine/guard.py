"""What several ranks take part in, guarded: a failure on one of them reaches them all, and ends it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from penstock.engine.agree import Refused
from penstock.engine.channel.control import Control
from penstock.engine.channel.wire import ChannelError
from penstock.engine.watch import Stopped, Watch
from penstock.errors import PipelineError, PlanError

__all__ = ["Guarded"]


class Guarded:
    """A rank's side of it. What has ended is not begun again."""

    watch: Watch
    control: Control
    ended: PipelineError | None = None

    def guarded(self, work: Callable[[], Any]) -> Any:
        """Do what other ranks take part in."""
        if self.ended is not None:
            raise PipelineError(f"this pipeline has stopped and must be built anew. It stopped because:\n{self.ended}")
        try:
            with self.watch:
                result = work()
                self.control.settle()
            return result
        except Refused as refused:
            error = PlanError(str(refused))
            self.refused(error)
            raise error from None
        except Stopped as stopped:
            self.stop(stopped.cause.error(), stopped.__cause__)
        except BaseException as error:
            ended = self.watch.explain(error)
            if isinstance(error, Exception) or self.watch.interrupt.sent:
                self.stop(ended, error)
            self.ended = ended
            self.close()
            raise

    def refused(self, error: PlanError) -> None:
        """Called where nothing has begun, on the ranks that take part together."""

    def stop(self, error: PipelineError, cause: BaseException | None) -> NoReturn:
        """End it by an error that all ranks know of."""
        self.ended = error
        if isinstance(cause, ChannelError):  # whose frames keep connections open that are to be closed
            traceback.clear_frames(cause.__traceback__)
        self.close()
        raise error from cause

    def close(self) -> None:
        raise NotImplementedError
