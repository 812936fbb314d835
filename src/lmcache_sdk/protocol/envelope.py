"""Provisional: replaced by the layout work."""

import enum


class PayloadForm(enum.Enum):
    """How tensors travel inline."""

    PICKLE = "pickle"
    ENVELOPE = "envelope"
