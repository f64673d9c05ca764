"""The floors of docs/architecture.md: what a file imports at run time lies on its own floor or below."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "nemo_style_aligner"
FLOORS = re.findall(r"^\| `(\w+)/` \|", (REPOSITORY / "docs" / "architecture.md").read_text(), re.MULTILINE)


def floor(part: str) -> int:
    return FLOORS.index(part) if part in FLOORS else len(FLOORS)  # single files lie below all folders


def imports(tree: ast.AST) -> list[str]:
    """Dotted names of what is imported, functions' own imports included; without those for type checkers alone."""
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
        return []
    if isinstance(tree, ast.ImportFrom):
        return [f"{tree.module}.{name.name}" for name in tree.names]
    if isinstance(tree, ast.Import):
        return [name.name for name in tree.names]
    return [name for child in ast.iter_child_nodes(tree) for name in imports(child)]


def test_all_folders_are_floors() -> None:
    assert sorted(FLOORS) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


@pytest.mark.parametrize("folder", [*FLOORS, ""])
def test_imports_go_downwards(folder: str) -> None:
    upwards = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in (PACKAGE / folder).glob("**/*.py" if folder else "[!_]*.py")
        for name in imports(ast.parse(path.read_text()))
        if name.startswith("nemo_style_aligner.") and floor(name.split(".")[1]) < floor(folder)
    ]
    assert not upwards


def _is_there(module: str, attribute: str) -> bool:
    return hasattr(importlib.import_module(module), attribute) or bool(
        importlib.util.find_spec(f"{module}.{attribute}")
    )


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_scripts_import_what_there_is(folder: str) -> None:
    """What a script imports of the package, wherever in it, without running it."""
    missing = []
    for path in (REPOSITORY / folder).glob("**/*.py"):
        for name in imports(ast.parse(path.read_text())):
            module, _, attribute = name.rpartition(".")
            if module.startswith("nemo_style_aligner") and not _is_there(module, attribute):
                missing.append(f"{path.relative_to(REPOSITORY)} imports {name}")
    assert not missing
