"""The doctor: what this machine has, what it can't do, why, what runs instead, and what to do about it."""

from .examine import doctor, examine

__all__ = ["doctor", "examine"]
