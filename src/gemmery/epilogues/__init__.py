"""Epilogues: torch functions over a product that run inside the kernel that makes it."""

from .function import Epilogue
from .trace import Untraceable

__all__ = ["Epilogue", "Untraceable"]
