"""One contender in a process of its own: `python worker.py NAME JSON`, where NAME is a module beside this file.

Says a JSON line when it is ready, then for each line on its standard input does one optimizer step and answers with its
seconds, until the input ends. What libraries print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from typing import Any

import torch
import workload


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    work = workload.Workload(**arguments["work"])
    workload.same_conditions(work.threads)
    try:
        contender = importlib.import_module(name)
        step, facts = contender.make(work, workload.make(work), arguments["options"])
        loss = step()  # the first: compilation, memory
    except Exception as error:  # a peer that does not run here is a line of the report, not the end of it
        answer(error=f"{type(error).__name__}: {error}"[:300])
        raise
    answer(ready=True, loss=loss, **facts)
    for command in sys.stdin:
        if command.strip() == "gemm":
            answer(gemm_flops_per_s=workload.gemm_rate(work))
            continue
        began, cpu_began = time.perf_counter(), time.process_time()
        loss = step()
        extra = {}
        if work.device == "cuda":
            torch.cuda.synchronize()
            extra["peak_gpu_mb"] = torch.cuda.max_memory_allocated() / 1e6
        answer(
            seconds=time.perf_counter() - began,
            cpu_seconds=time.process_time() - cpu_began,
            loss=loss,
            peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
            **extra,
        )


if __name__ == "__main__":
    main()
