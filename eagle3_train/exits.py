"""How a process of `eagle3` ends, in one place: exit codes, words, and what a launcher tells its steps. No torch."""

from __future__ import annotations

FAILED = 1  # a job that a command started did not succeed
MISTAKE = 2  # of the user's: one line, no traceback
INTERRUPTED = 130  # Ctrl-C
# Ended before it was done, in good order, by SIGTERM, SIGUSR2 or a time limit: the same command continues. It is the
# code with which shells and srun report a process that SIGTERM ended, and means the same: put the job back.
REQUEUE = 143
SUPERVISED = "EAGLE3_SUPERVISED"  # in the environment of a launcher's step: end when standard input closes


class Unfinished(SystemExit):
    """Ends this process with `REQUEUE`; an exception, so that children are ended and files left in order.

    how: to be said to the user, where it has not been said yet.
    """

    def __init__(self, how: str = "") -> None:
        super().__init__(REQUEUE)
        self.how = how


def why(error: BaseException) -> str:
    """What ended a process, in words for its user."""
    if isinstance(error, KeyboardInterrupt):
        return "Ctrl-C"
    return (error.how if isinstance(error, Unfinished) else "") or type(error).__name__
