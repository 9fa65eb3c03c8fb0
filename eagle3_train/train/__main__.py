"""`torchrun --nproc-per-node 2 -m eagle3_train.train engine=ddp ...`: the step `eagle3 train` as a module.

Started by torchrun, `accelerate launch`, the `deepspeed` launcher, or srun with a task a rank.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import MutableMapping

from eagle3_train.cli import main


def adopt_srun(environ: MutableMapping[str, str]) -> None:
    """Name the ranks of a job step that srun started as torchrun would, unless a launcher did so already."""
    if "RANK" in environ or int(environ.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return
    nodes = ["scontrol", "show", "hostnames", environ["SLURM_STEP_NODELIST"]]
    head = subprocess.run(nodes, check=True, capture_output=True, text=True).stdout.split()[0]
    for name, of_slurm in (("RANK", "PROCID"), ("WORLD_SIZE", "STEP_NUM_TASKS"), ("LOCAL_RANK", "LOCALID")):
        environ[name] = environ[f"SLURM_{of_slurm}"]
    if environ.get("CUDA_VISIBLE_DEVICES", "").isdecimal():  # of a GPU a task (srun --gpus-per-task=1): its only one
        environ["LOCAL_RANK"] = "0"
    environ.setdefault("MASTER_ADDR", head)
    # A port that other jobs on that node are unlikely to use.
    environ.setdefault("MASTER_PORT", str(20000 + int(environ["SLURM_JOB_ID"]) % 20000))


if __name__ == "__main__":
    adopt_srun(os.environ)
    # The deepspeed launcher adds its --local_rank=N; the environment says it too.
    main(["train", *(word for word in sys.argv[1:] if not re.fullmatch(r"--local[-_]rank=\d+", word))])
