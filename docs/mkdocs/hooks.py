"""What the site is made of besides docs/: pages that lie elsewhere, and `<!-- here: NAME ... -->`, made from the code.

A link to a file of the repository that is no page, such as rlkit/loop.py, keeps its text alone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import generate
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HERE = re.compile(r"^<!-- here: (\w+) ?(.*?) -->$", re.M)
LONG = 24  # characters of code that may stand in a table on one line
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def outside() -> dict[str, Path]:
    """Pages whose text lies outside docs/: their place in the site and their file."""
    notes = {f"experiments/{file.parent.name}.md": file for file in sorted(ROOT.glob("experiments/*/README.md"))}
    return notes | {name: ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Write out the nav entries that stand for several pages."""
    names = [*(file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md")), *outside()]
    config.nav = _expanded(config.nav, sorted(names))
    return config


def _expanded(nav: Any, names: list[str]) -> Any:
    if isinstance(nav, dict):
        return {title: _expanded(below, names) for title, below in nav.items()}
    if not isinstance(nav, list):
        return nav
    entries = []
    for entry in nav:
        many = isinstance(entry, str) and "*" in entry
        entries += [name for name in names if Path(name).match(entry)] if many else [_expanded(entry, names)]
    return entries


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    for name, file in outside().items():
        files.append(File.generated(config, name, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put what is generated in its place, and let links point to pages of the site."""
    home = Path(page.file.abs_src_path).parent
    if page.file.src_uri in config.extra["wide"]:
        page.meta["hide"] = ["toc"]

    def made(match: re.Match[str]) -> str:
        text = generate.DIRECTIVES[match[1]](*match[2].split())
        return relinked(text, ROOT, page.file.src_uri)

    try:
        return HERE.sub(made, relinked(markdown, home, page.file.src_uri))
    except (KeyError, ValueError) as error:
        raise PluginError(f"{page.file.src_uri}: {error!r}") from error


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let long code in tables break after a slash, a dot or an equals sign, and nowhere else; names of keys do not."""

    def broken(match: re.Match[str]) -> str:
        long = len(match[2]) > LONG and "id=" not in match[1]
        return match[1] + (re.sub(r"(?<=[/.=])(?=\w)(?!py\b)", "<wbr>", match[2]) if long else match[2])

    return re.sub(r"<td.*?</td>", lambda cell: re.sub(r"(<code[^>]*>)([^<]*)", broken, cell[0]), html, flags=re.S)


def relinked(text: str, home: Path, place: str) -> str:
    """Let the links of a text that lies in the folder `home` fit the page at `place` in the site."""
    pages = {file: name for name, file in outside().items()}

    def fitted(match: re.Match[str]) -> str:
        picture, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        file = Path(os.path.normpath(home / target))
        index = next((file / name for name in ("README.md", "index.md") if (file / name).is_file()), file)
        if index.is_relative_to(DOCS):
            there = index.relative_to(DOCS).as_posix()
        elif index in pages:
            there = pages[index]
        else:
            return words if file.exists() else match[0]  # what does not exist is for mkdocs to complain of
        return f"{picture}[{words}]({os.path.relpath(there, os.path.dirname(place) or '.')}{anchor})"

    return LINK.sub(fitted, text)
