"""The pages for users: links lead somewhere, keys are in the configs, quoted messages in the code.

``make docs`` builds them as a site, which also checks links and anchors.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
KEY = re.compile(
    r"(?<!nemo_style_aligner\.)\b(?:trainer|model|exp_manager|remote_critic_rm|remote_rm|inference)(?:\.[A-Za-z_]+)+\b(?![(*\"'])"
)
OF_OTHERS = {  # NeMo's, transformers', of a checkpoint
    *("model.dist_ckpt_format", "model.peft", "model.config.pad_token_id"),
    *("trainer.critic.history", "trainer.ledger.history"),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        if not name.startswith("http"):
            target = page.parent / name if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.fixture(scope="module")
def keys() -> set[str]:
    """Of all configs, sections among them."""
    return {key for path in (ROOT / "conf").glob("*.yaml") for key in dotted(yaml.safe_load(path.read_text()))}


def dotted(section: object) -> set[str]:
    if not isinstance(section, dict):
        return set()
    return set(section) | {f"{key}.{below}" for key, value in section.items() for below in dotted(value)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_keys_are_in_the_configs(page: Path, keys: set[str]) -> None:
    if page.name != "from_nemo_aligner.md":  # it names NeMo-Aligner's as well
        assert not set(KEY.findall(page.read_text(encoding="utf-8"))) - keys - OF_OTHERS


def test_quoted_messages_are_in_the_code() -> None:
    """Of troubleshooting.md's first columns: what stands in backquotes and has a blank, with ``...`` for anything."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
    quotes = [quote for cell in cells for quote in re.findall(r"`([^`]+ [^`]+)`", cell)]
    assert len(quotes) > 20
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "nemo_style_aligner").rglob("*.py"))
    texts = "\n".join(text for source in sources for text in strings(ast.parse(source))).lower()
    patterns = {quote: ".*".join(map(re.escape, quote.lower().split("..."))) for quote in quotes}
    assert not [quote for quote, pattern in patterns.items() if not re.search(pattern, texts)]


def strings(tree: ast.AST) -> list[str]:
    """Every string of a module, on one line; ``...`` stands for what is put into an f-string."""
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    whole = [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
        for node in formatted
    ]
    plain = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text.replace("\n", " ") for text in [*whole, *plain]]
