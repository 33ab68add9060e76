"""What mkdocstrings has to know of the docstrings: `Example:` heads examples, which griffe knows as `Examples:`."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Has examples shown as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object once it is read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
