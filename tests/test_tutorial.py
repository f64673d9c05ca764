"""docs/tutorial.md: every command on the page, as it stands, one after the other, as a new user types them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from job_processes import ROOT
from transformers import AutoModelForCausalLM

from nemo_style_aligner.guard.secret import TOKEN_FILE_VARIABLE

PAGE = ROOT / "docs" / "tutorial.md"
LIMIT_SECONDS = 3000


def commands() -> list[str]:
    """The page's bash blocks. Only the environment's folder is another."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [block.replace(".venv/", f"{sys.prefix}/") for block in blocks]


@pytest.mark.long
@pytest.mark.timeout(LIMIT_SECONDS + 60)
def test_the_tutorial_leads_to_a_better_served_model(tmp_path: Path) -> None:
    script = "set -eu\n" + "\n".join(f"echo '== block {i}'\n{block}" for i, block in enumerate(commands()))
    cache = os.environ.get("NEMO_STYLE_ALIGNER_CACHE", str(Path.home() / ".cache"))
    environment = {**os.environ, "HOME": str(tmp_path), "NEMO_STYLE_ALIGNER_CACHE": cache}
    del environment[TOKEN_FILE_VARIABLE]  # the tests' own; a new user gets one in the home directory
    log = tmp_path / "log"
    with log.open("w") as output:
        shell = subprocess.run(
            ["bash", "-c", script],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    shown = log.read_text()
    assert shell.returncode == 0, shown[-4000:]
    folder = tmp_path / "tutorial"
    for line in re.findall(
        r"^    (\S.*)$", PAGE.read_text(encoding="utf-8").split("nsa data show")[1].split("##")[0], re.M
    ):
        assert line in shown
    assert re.search(r"^even$", shown, re.M)  # nsa chat
    assert re.search(r'"content": ?"even', shown)  # nsa serve
    history = re.search(r"^history:\n((?:- .*\n)+)", shown, re.M)  # nsa inspect
    assert history is not None
    assert re.findall(r"^- (\w+) from .*/(\w+)\.nemo$", history[1], re.M) == [
        ("sft", "base"),
        ("ppo", "megatron_gpt_sft"),
    ]
    results = json.loads((folder / "evaluation.json").read_text())
    assert results["summary"]["accuracy"] > 0.8
    assert "html" in (folder / "results" / "report.html").read_text()[:200]
    assert AutoModelForCausalLM.from_pretrained(folder / "policy-hf").num_parameters() > 0


def test_the_page_shows_what_a_user_has_to_type() -> None:
    """Nothing in the test above is skipped: the page has all steps, and no block of another kind is a command."""
    text = PAGE.read_text(encoding="utf-8")
    assert len(commands()) == len(re.findall(r"^```\w", text, re.MULTILINE)) - 1  # make install
    for command in ("data show", "train_gpt_sft", "train_reward_model", "serve_ppo_critic", "ppo_actor", "nsa eval",
                    "nsa report", "nsa serve", "nsa chat", "nsa convert"):  # fmt: skip
        assert any(command in block for block in commands()), command
