"""What mkdocstrings has to know of the docstrings, which are written to be read in a terminal."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Readable(griffe.Extension):
    """Has examples, `Examples:` to griffe, shown as code, and sizes such as (*batch, N, K) as they are."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object once it is read."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = text.replace("(*batch", r"(\*batch")
