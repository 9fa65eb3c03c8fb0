"""Run a job from here: on this machine alone, or as one of the nodes that run it together."""

from __future__ import annotations

import socket
from collections.abc import Callable

from eagle3_train import config
from launch.cancel import Cancellation
from launch.command import command, environment, terminator
from launch.jobs import TRAINS, Job, detach, is_of_another_store, set_aside
from launch.lock import Lock
from launch.supervise import GRACE_S, Outcome, cut_short, failed_task, last_words, note_end, supervise


def run(job: Job, wait: bool = True, stop: Callable[[], str] = lambda: "", grace: float = GRACE_S) -> Outcome:
    """Run a job unless it is done, alone: while another process works on it, wait for that one, or with `wait=False`
    return "busy". A job of several nodes is joined instead (`launch=torchrun`): the first node to come holds the lock
    and the job's files, the others have a log of their own.

    `stop`, `grace`: see `supervise`. `eagle3 study cancel` stops the job too.
    """
    cancelled = Cancellation(job.cfg)
    detach(job.cfg)
    lock = Lock(job.folder / ".lock")
    if not lock.try_acquire():
        if job.cfg.launch.kind == "torchrun" and job.nodes > 1:
            return _join(job, cancelled)
        if not wait:
            return Outcome("busy")
        while not lock.acquire(patience=0):
            if reason := cancelled() or stop():
                return Outcome(reason)
    try:
        if job.is_done():  # perhaps the other process has done it
            return Outcome("done")
        if job.step in TRAINS and is_of_another_store(job.cfg, job.folder):
            set_aside(job.cfg, job.folder)
        config.save(job.cfg, job.folder / "config.yaml")
        outcome = supervise(
            command(job),
            job.folder,
            job.name,
            environment(job),
            lambda: "lost" if lock.lost.is_set() else cancelled() or stop(),
            terminator(job),
            grace,
        )
        if outcome.reason and cut_short(outcome) and terminator(job) and (code := failed_task(job.folder)):
            reason = f"exit code {code}"
            note_end(job.folder, "failed", reason)
            return Outcome("failed", outcome.seconds, reason, last_words(job.folder))
        if outcome.state == "done" and not job.finish():
            reason = "it ended well, but what it should have written is missing"
            if terminator(job):  # for srun, all is well where a node of the job has gone down
                reason += ": as a rule, a node of it went down"
                note_end(job.folder, "stopped", reason)
                return Outcome("preempted", outcome.seconds, reason)
            note_end(job.folder, "failed", reason)
            return Outcome("failed", outcome.seconds, reason, last_words(job.folder))
        return outcome
    finally:
        lock.release()


def _join(job: Job, cancelled: Cancellation) -> Outcome:
    folder = job.folder / f"node-{socket.gethostname()}"
    return supervise(command(job), folder, job.name, environment(job), cancelled)
