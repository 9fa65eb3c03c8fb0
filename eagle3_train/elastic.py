"""torchrun with this project's exit codes: `python -m eagle3_train.elastic` takes torchrun's arguments.

torchrun itself ends with 1 however its ranks ended. Here ranks that stopped in good order, to be continued, end it with
`REQUEUE`, as one process would, what the user got wrong with `MISTAKE`, and a rank that was killed from outside with
the shell's code for that (137), without a traceback. A signal to torchrun, which it hands on to its ranks and waits for
them, ends it with `REQUEUE` too, and Ctrl-C with `INTERRUPTED`.
"""

from __future__ import annotations

import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from eagle3_train.exits import INTERRUPTED, MISTAKE, REQUEUE


def main() -> None:
    try:
        torchrun(sys.argv[1:])
    except SignalException as e:
        sys.exit(INTERRUPTED if e.sigval == signal.SIGINT else REQUEUE)
    except ChildFailedError as e:
        if any(failure.exitcode == MISTAKE for failure in e.failures.values()):  # which no other rank's end causes
            sys.exit(MISTAKE)  # the rank has said all that there is to say
        rank, first = e.get_first_failure()  # the others may have been ended by torchrun
        if first.exitcode == REQUEUE:
            sys.exit(REQUEUE)
        if first.exitcode == -signal.SIGKILL:
            print(f"rank {rank} (process {first.pid}) was killed by SIGKILL (out of memory?)", file=sys.stderr)
            sys.exit(128 + signal.SIGKILL)
        raise


if __name__ == "__main__":
    main()
