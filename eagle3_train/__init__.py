"""Scaling-law studies of speculative-decoding draft heads: capture, train, measure, fit."""

__version__ = "0.1.0"
