"""What every rank of a test needs: imported once, by the server that forks them."""

from contextlib import suppress

import eagle3_train.evaluate
import eagle3_train.train  # noqa: F401
import tests.train.tiny_store  # noqa: F401

with suppress(ImportError):
    import deepspeed  # noqa: F401
