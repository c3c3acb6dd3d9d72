"""Decoding that survives a decoder that kills or hangs its process.

A worker notes what it decodes (`inflight`) and watches how long (`watchdog`). If an attempt ended badly, the next one
decodes the noted images in a child process (`careful`).
"""

from beam_pipeline.decoding.decoder import Decoding

__all__ = ["Decoding"]
