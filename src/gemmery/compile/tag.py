"""The part of `torch.compiler.config.cache_key_tag` by which Inductor's caches know whether gemmery is enabled.

From torch 2.13 on, torch's settings belong to the thread that makes them. gemmery is offered only where the tag is set,
so that code with its calls is never cached without the tag.
"""

from __future__ import annotations

import torch

from .. import __version__

TAG = f"[gemmery {__version__}]"


def is_tagged() -> bool:
    """Whether the tag is set in this thread."""
    return TAG in torch.compiler.config.cache_key_tag


def set_tag(is_on: bool) -> None:
    """Set the tag in this thread, or remove it."""
    config = torch.compiler.config
    config.cache_key_tag = config.cache_key_tag.replace(TAG, "") + (TAG if is_on else "")
