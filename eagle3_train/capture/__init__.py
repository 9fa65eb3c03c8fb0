"""The target's hidden states into stores."""

from .run import capture

__all__ = ["capture"]
