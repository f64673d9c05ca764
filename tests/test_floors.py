"""The floors of docs/architecture.md: what a file imports at run time lies on its own floor or below."""

from __future__ import annotations

import ast
import functools
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


def test_omegaconfs_configs_end_in_config_and_jobs() -> None:
    """Below, functions take sections, whose keys mypy knows."""
    named = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("**/*.py") if "DictConfig" in path.read_text()}
    assert named == {"config", "jobs"}


@functools.cache
def files() -> dict[str, Path]:
    """The package's modules by their dotted names."""
    named = {".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path for path in PACKAGE.glob("**/*.py")}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


@functools.cache
def imported_files(of_functions: bool) -> dict[str, set[str]]:
    """What files each file imports; with ``of_functions`` also when a function is called."""
    modules = files()
    imported = {}
    for module, path in modules.items():
        tree = ast.parse(path.read_text())
        names = imports(tree) if of_functions else [name for node in loaded(tree) for name in imports(node)]
        imported[module] = {name if name in modules else name.rpartition(".")[0] for name in names} & modules.keys()
    return imported


def loaded(node: ast.AST) -> list[ast.AST]:
    """The import statements that run when a module is imported."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [node]
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return []
    return [found for child in ast.iter_child_nodes(node) for found in loaded(child)]


def reached(module: str, imported: dict[str, set[str]]) -> set[str]:
    """The files that a file imports, and those that they import, and so on."""
    seen, left = set[str](), [module]
    while left:
        new = imported[left.pop()] - seen
        seen |= new
        left += new
    return seen


# How many other files of the package importing one of a room may load at most: what is reached, and a little room. A
# change that needs more should say why; one that needs fewer lowers the number.
BUDGETS = {
    "jobs": 215, "rl": 165, "serving": 110, "training": 102, "services": 90, "models": 86, "engine": 54,
    "checkpoints": 40, "placement": 45, "data": 36, "launch": 32, "telemetry": 24, "weights": 24, "config": 15,
    "cli": 10, "native": 6, "parallel": 5, "": 4,
}  # fmt: skip


@pytest.mark.parametrize("room", [*FLOORS, ""])
def test_a_room_loads_few_others(room: str) -> None:
    imported = imported_files(of_functions=False)
    loaded = {
        module: len([name for name in reached(module, imported) if files()[name].name != "__init__.py"])
        for module in imported
        if (module.count(".") > 1 and module.split(".")[1] == room) or (not room and module.count(".") == 1)
    }
    assert {module: count for module, count in loaded.items() if count > BUDGETS[room]} == {}


def test_no_file_imports_itself_through_others() -> None:
    imported = imported_files(of_functions=True)
    assert not [module for module in imported if module in reached(module, imported)]


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
