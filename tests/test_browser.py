"""The health page as a browser shows it: TensorBoard on a finished run, its charts drawn in a headless Chromium."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from browser import NAMES, Browser, chromium

import rlkit

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason=f"no browser: none of {', '.join(NAMES)} is in the PATH"),
]
PATIENCE = 90.0  # seconds for TensorBoard to start, and for the page to be drawn, on a busy machine

# Title, number of matching scalars and number of drawn curves of every chart; elements hide in shadow roots.
CHARTS = r"""
(() => {
  const all = (node) => [...node.querySelectorAll("*")].flatMap((e) => [e, ...(e.shadowRoot ? all(e.shadowRoot) : [])]);
  const cards = all(document).filter((e) => e.tagName === "TF-CUSTOM-SCALAR-MULTI-LINE-CHART-CARD");
  return cards.map((card) => {
    const inside = all(card.shadowRoot || card);
    const heading = inside.find((e) => e.tagName === "FIGCAPTION");
    const text = inside.flatMap((e) => [...e.childNodes]).filter((n) => n.nodeType === Node.TEXT_NODE);
    const matches = /Matches\s*\((\d+)\)/.exec(text.map((n) => n.data).join(" "));
    const curves = inside.filter((e) => e.matches("path.line") && (e.getAttribute("d") || "").includes("L"));
    return [heading ? heading.innerText.trim() : "", matches ? Number(matches[1]) : 0, curves.length];
  });
})()
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """Where a TensorBoard shows a small finished run."""
    folder = tmp_path_factory.mktemp("run")
    settings = {"log.every": 256, "eval.every": 512}
    rlkit.run(folder=folder, env="CartPole", algo="ppo", total_steps=2048, **settings)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(PATIENCE, server.kill)
    watchdog.start()
    try:
        assert server.stderr is not None
        lines: list[str] = []
        for line in server.stderr:
            lines.append(line)
            if found := re.search(r"http://\S+", line):
                watchdog.cancel()
                threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would stop it
                yield found[0]
                break
        else:
            pytest.fail("TensorBoard did not start:\n" + "".join(lines))
    finally:
        watchdog.cancel()
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def page(address, tmp_path_factory) -> Iterator[Browser]:
    browser = Browser(chromium() or "", tmp_path_factory.mktemp("profile"))
    try:
        browser.command("Page.navigate", url=f"{address}?darkMode=false#custom_scalars")
        yield browser
    finally:
        browser.close()


def charts(page: Browser) -> dict[str, tuple[int, int]]:
    """Title of a chart -> numbers of scalars and of drawn curves, once each chart has drawn its scalars."""
    until = time.monotonic() + PATIENCE
    while True:
        found = {title: (matches, curves) for title, matches, curves in page.evaluate(CHARTS)}
        if found and all(0 < matches <= curves for matches, curves in found.values()) or time.monotonic() > until:
            return found
        time.sleep(0.5)


def test_the_health_page_shows_ratio_advantage_and_kl_as_charts_with_curves(page: Browser) -> None:
    found = charts(page)
    assert {"ratio", "advantage", "KL"} <= set(found), f"the page has {sorted(found) or 'no chart'}"
    assert [found[title][0] for title in ("ratio", "advantage", "KL")] == [3, 2, 1]
    assert {title for title, (matches, curves) in found.items() if not 0 < matches <= curves} == set()
