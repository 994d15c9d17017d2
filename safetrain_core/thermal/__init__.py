"""What must not cook: GPU readings, and a guard that pauses training when the card is hot and ends it when critical."""

from .states import Thresholds, next_state

__all__ = ["Thresholds", "next_state"]
