"""`torchrun --nproc-per-node 2 -m eagle3_train.train engine=ddp ...`: the step `eagle3 train` as a module."""

from __future__ import annotations

import sys

from eagle3_train.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
