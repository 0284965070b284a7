"""``python -m workers``: the same as ``zbus-worker``. So controllers start agents.

The template of a start is forked first of all: what only the agent needs, its command line among it, is then imported
beside what only the ranks need.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.template import Template


def _fork_template(arguments: Sequence[str]) -> Template | None:
    """Fork the template of ``start``; None for other commands, where ranks are to be started without, and on failure.

    What is lacking then is the agent's to say, which tries again.
    """
    if arguments[:1] != ["start"] or "--no-template" in arguments:
        return None
    gc.disable()  # until the command has imported the rest: its modules stay anyway
    from workers.template import Template

    with contextlib.suppress(OSError):
        return Template.fork()
    return None


if __name__ == "__main__":
    _template = _fork_template(sys.argv[1:])

    from workers.cli import main

    main(template=_template)
