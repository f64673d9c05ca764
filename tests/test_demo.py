"""The demo deletes nothing but what a demo has made."""

from __future__ import annotations

from pathlib import Path

import pytest
from stages import Demo, StageFailed


def test_an_output_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "results" / "model.nemo"
    precious.parent.mkdir()
    precious.touch()
    with pytest.raises(StageFailed, match="is not empty and was not made by a demo"):
        Demo(tmp_path / "results", num_stages=1)
    assert precious.exists()


def test_a_stage_says_when_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = Demo(tmp_path / "demo", num_stages=2)
    with demo.stage("sft", "SFT") as results:
        assert capsys.readouterr().out == "[1/2] SFT ...\n"
        results.append("loss 1")
    assert capsys.readouterr().out == "[1/2] SFT: loss 1 (0 s)\n"


def test_a_demo_begins_anew_in_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    demo = Demo(tmp_path / "demo", num_stages=1)
    (demo.directory / "sft").mkdir()
    assert (Demo(tmp_path / "demo", num_stages=1, keep=True).directory / "sft").exists()
    assert not (Demo(tmp_path / "demo", num_stages=1).directory / "sft").exists()
