"""The target's hidden states into stores, and its own text."""

from .backend import open_writer
from .captured import captured_rows
from .passes import share_passes
from .rolling import roll
from .run import capture

__all__ = ["capture", "captured_rows", "open_writer", "roll", "share_passes"]
