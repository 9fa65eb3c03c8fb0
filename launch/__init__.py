"""Launchers: run a step of the pipeline in processes of its own, here or on a cluster. No torch."""

from launch.cancel import cancel
from launch.coupled import Coupled, make_session, write_session
from launch.jobs import Job
from launch.local import run
from launch.supervise import Outcome

__all__ = ["Coupled", "Job", "Outcome", "cancel", "make_session", "run", "write_session"]
