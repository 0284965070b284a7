"""traceview: reads the trace files of a run and makes one timeline, statistics and checks of them."""

from __future__ import annotations

__all__: list[str] = []
