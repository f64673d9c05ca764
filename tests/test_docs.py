"""The pages for users: their links lead somewhere, and the keys that they name are in the configs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
KEY = re.compile(r"\b(?:trainer|model|exp_manager|remote_critic_rm|remote_rm|inference)(?:\.[A-Za-z_]+)+\b(?![(*\"'])")
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
