"""Memory that pulled arrays arrive in: nobody else has it, so its reader may write to it."""

from __future__ import annotations

from typing import Any

import numpy as np

from zbus.codec.decoder import Lender

__all__ = ["Pulled"]


class Pulled(np.ndarray[Any, Any], Lender):
    """Bytes that were pulled; see ``zbus.codec.decoder.Lender``."""

    def private(self) -> memoryview:
        """Return the bytes themselves: they are writable and nobody else's as they stand."""
        return self.data
