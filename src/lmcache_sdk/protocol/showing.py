"""Values that a server sent, as an error shows them: short, whatever they are."""

from __future__ import annotations

from typing import Final

MAX_SHOWN: Final = 120
"""Characters of a text."""


def show(value: object) -> str:
    """A scalar as text, cut; of what may be large or deep only the type."""
    if isinstance(value, (str, bytes)):
        return repr(value[:MAX_SHOWN]) + ("…" if len(value) > MAX_SHOWN else "")
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (list, dict)) else type(value).__name__
