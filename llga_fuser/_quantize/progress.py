"""Says on standard error how far calibration has come."""

from __future__ import annotations

import sys
import time

__all__ = ["Progress"]


class Progress:
    """A line for each step; on a terminal always the same line, gone at the end."""

    def __init__(self, on: bool | None, total: int | None) -> None:
        self._stream = sys.stderr
        self._terminal = self._stream is not None and self._stream.isatty()
        self._on = self._terminal if on is None else on and self._stream is not None
        self._total = total
        self._begin = time.monotonic()

    def __call__(self, step: str, batch: int | None = None) -> None:
        if not self._on:
            return
        if batch is not None:
            step += f" {batch}" + (f" of {self._total}" if self._total is not None else "")
        text = f"quantize [{time.monotonic() - self._begin:4.0f} s]: {step}"
        self._stream.write(f"\r\x1b[K{text[:79]}" if self._terminal else f"{text}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Removes the line."""
        if self._on and self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
