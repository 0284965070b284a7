from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "changelog.d/*.md")
    for page in ROOT.glob(pattern)
    if "_build" not in page.parts
)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_somewhere(page):
    """A link inside the repository names a file that exists."""
    path = ROOT / page
    links = _LINK.findall(_FENCE.sub("", path.read_text(encoding="utf-8")))
    broken = [link for link in links if "://" not in link and not (path.parent / link).exists()]

    assert broken == []


@pytest.mark.parametrize("kind", ["tutorials", "how-to", "reference", "explanation", "decisions"])
def test_each_kind_of_page_has_an_index(kind):
    """The four kinds, and the decisions, each have their entry page, and the front page lists it."""
    assert (ROOT / "docs" / kind / "index.md").is_file()
    assert f"({kind}/index.md)" in (ROOT / "docs" / "index.md").read_text()


def test_the_first_screen_shows_a_short_script_and_exactly_two_commands():
    """The README opens with one sentence, a script of about a dozen lines, and ./zb demo and ./zb test."""
    text = (ROOT / "README.md").read_text()
    script, *_ = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    code = [line for line in script.splitlines() if line.strip() and not line.startswith("#")]

    assert len(code) <= 12
    assert re.search(r"^```sh\n\./zb demo +#.*\n\./zb test +#.*\n```", text, re.MULTILINE)
    assert "pip install zbus-runtime" in text
    assert not re.search(r"pip install zbus(?!-runtime)", text)


def test_nobody_is_told_to_install_the_foreign_package():
    """No page says ``pip install zbus``: that name belongs to someone else."""
    offenders = [page for page in PAGES if re.search(r"install (-e )?zbus(?![-\w/])", (ROOT / page).read_text())]

    assert offenders == []
