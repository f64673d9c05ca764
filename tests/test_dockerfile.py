"""The images install this package without its dependencies and list them by hand: the lists must not fall behind."""

from __future__ import annotations

import re

import pytest
from job_processes import ROOT
from packaging.requirements import Requirement

# Brought by the images, or installed before everything else.
OF_THE_IMAGE = {"gpu": {"torch", "megatron-core", "numpy"}}
OF_THE_IMAGE["trtllm-engine"] = OF_THE_IMAGE["gpu"] | {"transformers", "tokenizers"}


@pytest.mark.parametrize("stage", OF_THE_IMAGE)
def test_dependencies_are_those_of_the_package(stage: str) -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.split("\ndependencies = [")[1].split("\n]")[0]
    declared = {
        Requirement(text).name: Requirement(text).specifier for text in re.findall(r'^ *"([^"]+)"', section, re.M)
    }
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    part = re.split(r"^FROM ", dockerfile.split(f" AS {stage}\n")[1], flags=re.M)[0]
    listed = {
        Requirement(text).name: Requirement(text).specifier for text in re.findall(r'"([a-z0-9_-]+[<>=][^"$]*)"', part)
    }
    assert listed == {name: specifier for name, specifier in declared.items() if name not in OF_THE_IMAGE[stage]}
