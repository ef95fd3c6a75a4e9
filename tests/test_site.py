"""The documentation site lists every page and public name, and has no broken links."""

from __future__ import annotations

import importlib.util
import inspect
import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

import penstock as ps
from penstock.schedule import SCHEDULES
from tests.support.programs import environment, python, run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
BUILDER = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")


def test_navigation_lists_every_page_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert sorted(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages(page: str) -> None:
    """Without building the site."""
    text = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith("https://"):
            assert (DOCS / page).parent.joinpath(target).resolve().is_relative_to(DOCS), f"{target} is not in the site"
            assert (DOCS / page).parent.joinpath(target).exists(), target


def reference() -> set[str]:
    """The dotted names that the reference pages list."""
    found = set()
    for path in (DOCS / "reference").glob("*.md"):
        for name, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", path.read_text("utf-8") + "\n", re.MULTILINE):
            members = re.search(r"members: \[(.*)\]", options)
            found |= {f"{name}.{member}" for member in members[1].split(", ")} if members else {name}
    return found


def test_every_public_name_is_in_the_reference() -> None:
    named = reference()
    for name in dir(ps):
        value = getattr(ps, name)
        if not name.startswith("_") and not inspect.ismodule(value):
            parts = value.__module__.split(".")
            places = {value.__module__, *(".".join([*parts[:size], name]) for size in range(2, len(parts) + 1))}
            assert named & places, f"{name} of {value.__module__} is on no page of docs/reference"


def test_every_schedule_is_in_the_reference() -> None:
    named = reference()
    for kind in SCHEDULES.values():
        assert f"{kind.make.__module__}.{kind.make.__name__}" in named


def test_site_builds_without_broken_links(tmp_path: Path) -> None:
    missing = [name for name in BUILDER if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: make docs installs what builds the site")
    command = python("-m", "mkdocs", "build", "--strict", "--config-file", ROOT / "mkdocs.yml", "--site-dir", tmp_path)
    done = run(command, environment(NO_MKDOCS_2_WARNING="1"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

    texts = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    for page in PAGES:
        assert tmp_path / page.replace(".md", ".html") in texts
    for path, text in texts.items():
        if path.name == "404.html":  # the 404 page has absolute links
            continue
        for target in re.findall(r'(?:href|src)="([^"]*)"', text):
            place, _, anchor = unquote(unescape(target)).partition("#")
            if ":" in place.partition("/")[0]:
                assert place.startswith(("https://", "mailto:")), target
                continue
            there = (path.parent / place).resolve() if place else path
            there = there / "index.html" if there.is_dir() else there
            assert there.exists(), f"{path.name}: {target}"
            if anchor and there in texts:
                assert f'id="{anchor}"' in texts[there] or anchor.startswith("__"), f"{path.name}: {target}"
    assert not any("::</p>" in text for text in texts.values())
    html = "".join(texts[path] for path in texts if path.parent.name == "reference")
    for name in ("penstock.split.split", "penstock.train.pipeline.Pipeline.step", "penstock.schedule.costs.Costs"):
        assert f'id="{name}"' in html
