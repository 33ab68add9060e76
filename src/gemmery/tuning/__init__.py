"""Measuring configs and compiling ahead, for calls that come later."""
