"""What the command `eagle3` is: the command line, whose imports take a moment in which Ctrl-C is no error either."""

from __future__ import annotations

import sys
from typing import NoReturn

from eagle3_train.exits import INTERRUPTED


def main() -> NoReturn:
    try:
        from eagle3_train import cli
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    cli.main()
