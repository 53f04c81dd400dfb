"""From a rule over one axis to the layouts of one call on many axes. No torch."""

from weft.propagate.expand import decide

__all__ = ["decide"]
