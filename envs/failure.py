"""The one exception for an environment with which a run cannot go on."""

from __future__ import annotations

import traceback

from rlkit.faults import Fault


class EnvironmentFailure(Fault):
    """An environment raised an exception, or gave what nothing can be learned from."""

    @classmethod
    def of(cls, error: BaseException, text: str) -> EnvironmentFailure:
        """Return the failure that an exception of the environment is; its first frame, which caught it, is left out."""
        frames = error.__traceback__
        lines = traceback.format_exception(error.with_traceback(frames.tb_next if frames else None))
        return cls(text, trace="".join(lines).rstrip())

    def in_lane(self, lane: int, lanes: int, members: int) -> EnvironmentFailure:
        """Return it with the environment's place: `lane` of `lanes`, of which each member has equally many."""
        each = max(lanes // members, 1)
        return self.said_of(f"environment {lane % each} of member {{member}}", lane // each)

    def said_of(self, whom: str, member: int | None = None) -> EnvironmentFailure:
        """Return it with whom it happened to, in words, before its text."""
        return EnvironmentFailure(f"{whom} {self.text}", member, self.trace)


def in_words(error: BaseException) -> str:
    """Name an exception and the first line of its message, if it has one."""
    message = str(error).strip().partition("\n")[0]
    return type(error).__name__ + (f": {message}" if message else "")
