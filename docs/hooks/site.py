"""MkDocs' hooks: pages that are made of the repository's files, and checks of what every page must be."""

from __future__ import annotations

import html
import json
import posixpath
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# What is described is this checkout, not a copy that happens to be installed.
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import gemmery  # noqa: E402
from docs.hooks import chart, drawings, notebooks, repository, rungs  # noqa: E402

#: In a page, the picture that a command draws, or the page that it exports.
_MADE = re.compile(r"^<!-- (picture|page): (.+) -->$", re.MULTILINE)
#: By which option of a command each is made, and the ending of its name.
OPTIONS = {"picture": ("--out", ".svg"), "page": ("--export", ".html")}
#: A block with output of a command, or with a drawing in characters, whose lines should not be broken.
_OUTPUT = re.compile(r'<div class="language-(?:console|text) highlight">(?=<pre>(.*?)</pre>)', re.DOTALL)
#: Where the picture of the results is.
_CHART = "<!-- chart: results -->"
#: How much a page counts in a search, by how its name begins. Otherwise figures, and lists of all names, would come
#: before the pages that explain a word.
SEARCH = {
    "results-rows.md": {"exclude": True},
    "results.md": {"boost": 0.3},
    "changelog.md": {"boost": 0.3},
    "contributing.md": {"boost": 0.5},
    "extending.md": {"boost": 0.7},
    "api/": {"boost": 0.7},
    "ladder/": {"boost": 0.8},
    "low-bit.md": {"boost": 3},
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version, and link to the repository once it has an address."""
    config.site_name = f"gemmery {gemmery.__version__}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if address := project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]:
        config.repo_url, config.repo_name = address, "gemmery"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that are made of files outside of docs/."""
    made: dict[str, str] = {name: repository.page(name) for name in repository.WHOLE}
    made |= rungs.pages()
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    for rung in rungs.rungs():
        text = json.dumps(notebooks.notebook(rung), indent=1, ensure_ascii=False)
        files.append(File.generated(config, f"ladder/notebooks/{rung.path.stem}.ipynb", content=text))
    for name in repository.pictures():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for page in list(files.documentation_pages()):
        for kind, command in _MADE.findall(page.content_string):
            try:
                made_by = drawings.of_command(command, *OPTIONS[kind])
                files.append(File.generated(config, _place(kind, command), content=made_by))
            except ValueError as error:
                raise PluginError(f"{page.src_uri}: {error}") from error
    return files


def _place(kind: str, command: str) -> str:
    """Where on the site is what a command makes."""
    name = re.sub(r"[^a-z0-9]+", "-", command.lower()).strip("-")
    return f"made/{name}{OPTIONS[kind][1]}"


def _shown(kind: str, command: str, up: str) -> str:
    """What a command makes, as Markdown of a page."""
    at = f"{up}{_place(kind, command)}"
    if kind == "picture":
        return f"![gemmery {command}]({at})".replace('"', "")
    frame = f'<iframe class="made" src="{at}" title="{html.escape(f"gemmery {command}")}" loading="lazy"></iframe>'
    return f"{frame}\n\n[Open the page alone]({at})."


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Show what commands make, and lead links to files of the repository to pages of the site."""
    name = page.file.src_uri
    up = "../" * name.count("/")
    markdown = _MADE.sub(lambda found: _shown(found[1], found[2], up), markdown)
    if _CHART in markdown:
        markdown = markdown.replace(_CHART, chart.results())
    if found := [how for start, how in SEARCH.items() if name.startswith(start)]:
        page.meta["search"] = found[0]
    if page.file.generated_by is not None:
        return markdown
    try:
        return repository.moved(markdown, posixpath.join("docs", name), name)
    except ValueError as error:
        raise PluginError(str(error)) from error


def on_page_content(content: str, **_: Any) -> str:
    """Tell the style sheet the length of the longest line of each block of output, which it makes fit."""
    return _OUTPUT.sub(_with_columns, content)


def _with_columns(block: re.Match[str]) -> str:
    lines = html.unescape(re.sub("<[^>]+>", "", block[1])).splitlines()
    return f'{block[0][:-1]} style="--columns: {max(map(len, lines), default=0)}">'


def on_page_context(context: Any, page: Page, config: MkDocsConfig, nav: Navigation) -> Any:
    """Say where the page's text is written, with a link once the repository has an address."""
    source = repository.source(page.file.src_uri)
    page.meta["source"] = source
    page.edit_url = (
        f"{config.repo_url.rstrip('/')}/edit/main/{source}" if config.repo_url and source else None
    )
    return context


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Refuse a page that would fetch something, and one of the reference that shows a module for what is in it."""
    name = page.file.src_uri
    if name.startswith("api/") and "doc-symbol-module" in output:
        raise PluginError(
            f"{name} shows a module where a function of the same name was meant: give its whole path"
        )
    if found := repository.FETCHED.search(output):
        raise PluginError(f"{name} fetches from the network: {found[0][:120]}")
    return output
