"""Bounded memos: dictionaries that drop half of what they hold when they are full."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

#: The most entries of a memo.
KEPT = 4096

_lock = threading.Lock()

V = TypeVar("V")


def keep(kept: dict[Any, V], key: Any, value: V) -> V:
    """The value, which is found again in `kept`; the older half goes when there are `KEPT` entries."""
    with _lock:
        if len(kept) >= KEPT:
            for stale in list(kept)[: max(1, KEPT // 2)]:
                del kept[stale]
        kept[key] = value
    return value
