"""The address of the documentation, for messages: on the project's site if the installed package names one."""

from __future__ import annotations

from importlib import metadata


def page(name: str, anchor: str = "") -> str:
    """The address of a page, or its file in the repository where the package names no site.

    Args:
        name: the page's file under `docs`, without its ending.
        anchor: of a heading in it.

    Example:
        >>> page("epilogues").removesuffix("/").removesuffix(".md").endswith("epilogues")
        True
    """
    site = _site()
    if site is None:
        return f"docs/{name}.md"
    return f"{site.rstrip('/')}/{name}/{f'#{anchor}' if anchor else ''}"


def _site() -> str | None:
    """The site's address, which `hatch_build.addresses` writes into the package's metadata."""
    try:
        urls = metadata.metadata("gemmery").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return None  # run from a checkout
    named = dict(url.split(", ", 1) for url in urls)
    return named.get("Documentation")
