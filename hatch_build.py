"""Sets package metadata that depends on the repository's public address, which pyproject.toml may name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\])\((?!https?:|mailto:|#)(?P<path>[^)\s]+)\)")


def addresses(repository: str) -> dict[str, str]:
    """The project's addresses, given that of its repository; none without one."""
    if not repository:
        return {}
    found = {
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
    }
    where = urlsplit(repository)
    if where.hostname == "github.com":
        owner, name = where.path.strip("/").split("/")
        found["Documentation"] = f"https://{owner.lower()}.github.io/{name}/"
    return found


def readme(text: str, repository: str) -> str:
    """README for a page elsewhere: its links to the repository's files are given the repository's address."""
    if not repository:
        return text

    def lead(match: re.Match[str]) -> str:
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}{match['text']}({repository}/{kind}/HEAD/{match['path']})"

    return _LINK.sub(lead, text)


class Addresses(MetadataHookInterface):
    """Sets `urls` and `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both."""
        repository = self.config["repository"].rstrip("/")
        metadata["urls"] = addresses(repository)
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(text, repository)}
