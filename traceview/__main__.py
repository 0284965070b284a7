"""``python -m traceview`` is the ``traceview`` command."""

from __future__ import annotations

from traceview.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main(prog_name="traceview")
