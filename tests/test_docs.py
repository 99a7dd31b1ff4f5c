"""The documentation: the site as it is built, and what its pages say of the code."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import NAMES, Browser, chromium

import rlkit
from rlkit.advantage import ESTIMATORS
from rlkit.build import to_config
from rlkit.conf.schema import ConfigError, options, pieces, sections
from rlkit.symptoms import FAULTS, SYMPTOMS
from rlkit.train import compose

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
KEYS = {row[0] for _, rows in sections() for row in rows} | {
    f"stabilizer.{part}.{key}"
    for name in options("stabilizer")
    for part, entry in pieces(name)[1].items()
    for key in entry
    if key != "_target_"
}
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}


class Tags(HTMLParser):
    """The addresses of a page: where its links lead, what it loads, and the names that links may lead to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.text: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if (address := given.get(LOADING.get(tag, ""))) and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(address)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def broken(site: Path) -> list[str]:
    """Links of a site that lead to no file of it, or to no place in that file."""
    pages = {page: Tags(page) for page in site.rglob("*.html")}
    wrong = []
    for page, tags in pages.items():
        for address in tags.links + tags.loads:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = Path(os.path.normpath(page.parent / unquote(parts.path))) if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            there = target.is_file() and (not anchor or target not in pages or anchor in pages[target].ids)
            if not there and page.name != "404.html":  # whose addresses start at the root of a host
                wrong.append(f"{page.relative_to(site)}: {address}")
    return wrong


def foreign(site: Path) -> list[str]:
    """What the pages and styles of a site load from elsewhere."""
    loads = [(page, address) for page in site.rglob("*.html") for address in Tags(page).loads]
    loads += [
        (style, address)
        for style in site.rglob("*.css")
        for address in re.findall(r"(?:url\(|@import )[\"']?([^\"')]+)", style.read_text())
    ]
    return [f"{file.relative_to(site)}: {address}" for file, address in loads if urlsplit(address).netloc]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", DOCS / "mkdocs" / "mkdocs.yml", "-d", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.fixture(scope="module")
def hooks():
    """The module that mkdocs loads."""
    path = DOCS / "mkdocs" / "hooks.py"
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("hooks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(path.parent))


def rows(page: str, head: str) -> list[list[str]]:
    """The cells of the tables of a page that begin with a head."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", (DOCS / page).read_text(), re.M):
        lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]
        cells = [[cell.strip() for cell in line] for line in lines]
        if cells[0][0] == head:
            found += cells[2:]
    return found


# --- the site --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_site_has_every_page_and_no_broken_link(site):
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS)).with_suffix(".html").is_file(), page
    for experiment in ROOT.glob("experiments/*/README.md"):
        assert (site / "experiments" / f"{experiment.parent.name}.html").is_file(), experiment
    assert broken(site) == []


@pytest.mark.slow
def test_the_site_loads_nothing_from_another_host(site):
    assert foreign(site) == []


@pytest.mark.slow
def test_the_site_shows_every_key_and_every_finding(site):
    assert Tags(site / "configuration.html").ids >= KEYS
    page = Tags(site / "troubleshooting.html")
    assert page.ids >= {rule.__name__ for rule in (*FAULTS, *SYMPTOMS)}
    assert "".join(page.text).count("What helps") == len(FAULTS) + len(SYMPTOMS)
    assert "nan" not in "".join(page.text).split()


@pytest.mark.slow
def test_the_site_shows_the_public_functions(site):
    headings = "".join(Tags(site / "api.html").text)
    assert all(f"rlkit.{name}" in headings for name in rlkit.__all__ if not name.startswith("_"))


TYPE = """
{
  const field = document.querySelector("[data-md-component=search-query]");
  field.focus();
  field.value = "degenerate";
  field.dispatchEvent(new Event("keyup"));
}
"""


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(chromium() is None, reason=f"no browser: none of {', '.join(NAMES)} is in the PATH")
def test_the_search_works_from_a_folder_and_asks_no_other_host(site, tmp_path):
    browser = Browser(chromium(), tmp_path)
    try:
        browser.command("Page.navigate", url=(site / "index.html").as_uri())
        wait_for(browser, "document.readyState === 'complete' && !!document.querySelector('iframe')")
        browser.evaluate("document.querySelector('#__search').click()")
        browser.evaluate(TYPE)
        wait_for(browser, "[...document.querySelectorAll('.md-search-result__link')].some(a => /trouble/.test(a.href))")
        loaded = browser.evaluate("[...document.querySelectorAll('[src], link[href]')].map(e => e.src || e.href)")
        assert len(loaded) > 5 and all(address.startswith("file:") for address in loaded), loaded
    finally:
        browser.close()


def wait_for(browser: Browser, condition: str, seconds: float = 60.0) -> None:
    """Wait until a JavaScript condition holds in the page."""
    until = time.monotonic() + seconds
    while not browser.evaluate(condition):
        assert time.monotonic() < until, condition
        time.sleep(0.1)


def test_make_docs_stops_at_warnings_and_does_not_hide_them():
    (recipe,) = re.findall(r"^docs:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert " --strict " in recipe
    assert not {"-q", "--quiet"} & set(recipe.split())  # with it mkdocs sees no warning that strict could stop at


def test_a_broken_link_and_a_foreign_file_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<p id="x"><a href="b.html#y">1</a><a href="#x">2</a><a href="c.html">3</a>')
    (tmp_path / "b.html").write_text('<a href="a.html#x">1</a><a href="https://example.org/z">2</a>')
    (tmp_path / "s.css").write_text("@font-face { src: url(https://example.org/f.woff2) }")
    assert broken(tmp_path) == ["a.html: b.html#y", "a.html: c.html"]
    assert foreign(tmp_path) == ["s.css: https://example.org/f.woff2"]


def test_links_of_a_text_fit_the_page_it_is_shown_on(hooks):
    text = "[a](docs/stabilizers.md) [b](experiments/stability) [c](rlkit/loop.py) [d](docs/decisions) [e](no.md#x)"
    shown = "[a](../stabilizers.md) [b](../experiments/stability.md) c [d](index.md) [e](no.md#x)"
    assert hooks.relinked(text, ROOT, "decisions/0001.md") == shown
    assert hooks.relinked("[a](https://example.org) [b](#x)", ROOT, "a.md") == "[a](https://example.org) [b](#x)"


def test_what_cannot_be_generated_is_an_error(hooks):
    generate = hooks.generate
    with pytest.raises(ValueError, match="is not refused"):
        generate.refused("env=CartPole", "algo=ppo")
    with pytest.raises(ValueError, match="no section Nonsense"):
        generate.readme("Nonsense")
    assert "must be one of" in generate.refused("env=CartPol", "algo=ppo")


# --- what pages say --------------------------------------------------------------------------------------------------


def test_every_argument_of_stable_baselines3_s_ppo_has_a_row():
    ppo = pytest.importorskip("stable_baselines3").PPO
    wanted = [name for name in inspect.signature(ppo.__init__).parameters if name != "self"]
    there = [row[0].strip("`") for row in rows("stable_baselines3.md", "there")]
    assert there[: len(wanted)] == wanted  # the first table, in their order
    assert all(len(row) == 3 and all(row) for row in rows("stable_baselines3.md", "there"))


def test_the_methods_page_has_every_method_and_every_estimator():
    cells = rows("methods.md", "id")
    wanted = {"A": 7, "B": 10, "C": 6, "D": 10, "G": 4}
    ids = {f"{letter}{k}" for letter, count in wanted.items() for k in range(1, count + 1)} | {"D12"}
    assert [row[0] for row in cells] == sorted(ids, key=lambda x: (x[0], int(x[1:])))
    assert {row[1].strip("`") for row in cells if row[0].startswith("B")} == set(ESTIMATORS)


PARTS = "env|algo|policy|exploration|eval|checkpoint|log|stabilizer"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_keys_and_files_that_a_page_names_exist(page):
    for span in re.findall(r"`([^`\n]+)`", page.read_text()):
        for key in re.findall(rf"(?<![\w./])(?:{PARTS})\.(?!pt\b)[a-z0-9_.]+", span):
            whole = key.rstrip(".")
            assert any(known == whole or known.startswith(f"{whole}.") for known in KEYS), span
        for file in re.findall(r"^(?:rlkit|envs|conf|experiments|tests|docs)/[\w/.]+", span):
            assert (ROOT / file).exists(), span


COMMANDS = [
    (page.name, command)
    for page in PAGES
    for command in re.findall(r"^    python -m rlkit\.train (.*?)(?:  +#.*)?$", page.read_text(), re.M)
]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_the_commands_of_a_page_are_valid(page, command):
    """The first job of those that are sweeps; classes of the reader's own are tried by tests/test_readme.py."""
    overrides = [part for part in shlex.split(command) if not part.startswith("hydra/")]
    if overrides[0] == "-m":
        overrides = [part.partition(",")[0] for part in overrides[1:]]
    try:
        to_config(compose(overrides)[0])
    except ConfigError as error:
        pytest.fail(f"{page}: {error}")
