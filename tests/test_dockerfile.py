"""Images install this package without its dependencies and list them by hand: the lists must not fall behind."""

from __future__ import annotations

import re

import pytest
from job_processes import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

# Brought by the images, or installed before everything else.
OF_THE_IMAGE = {"gpu": {"torch", "megatron-core", "numpy"}}


def requirements(pattern: str, text: str) -> dict[str, SpecifierSet]:
    found = map(Requirement, re.findall(pattern, text, re.M))
    return {requirement.name: requirement.specifier for requirement in found}


@pytest.fixture(scope="module")
def declared() -> dict[str, SpecifierSet]:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return requirements(r'^ *"([^"]+)"', project.split("\ndependencies = [")[1].split("\n]")[0])


@pytest.mark.parametrize("stage", OF_THE_IMAGE)
def test_dependencies_are_those_of_the_package(stage: str, declared: dict[str, SpecifierSet]) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    part = re.split(r"^FROM ", dockerfile.split(f" AS {stage}\n")[1], flags=re.M)[0]
    listed = requirements(r'"([a-z0-9_-]+[<>=][^"$]*)"', part)
    assert listed == {name: specifier for name, specifier in declared.items() if name not in OF_THE_IMAGE[stage]}
    assert "RUN pip freeze" not in part  # its `name @ file://` are no constraints where the file is gone
