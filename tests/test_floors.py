"""The flats and floors of docs/architecture.md: what a file imports at run time lies on its own floor or below."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "nemo_style_aligner"
ROOMS = re.findall(r"^\| `([\w/]+)/` \|", (REPOSITORY / "docs" / "architecture.md").read_text(), re.MULTILINE)
FLATS = ["tools", "trainer", "engine", "guard", ""]  # the last: single files below all


def flat_of(module: str) -> str:
    """Of a module's name in the package, ``trainer.rl.loop``."""
    return module.split(".")[0] if module.split(".")[0] in FLATS else ""


def room_of(module: str) -> str:
    """Of a module's name in the package: its room, else its flat."""
    room = "/".join(module.split(".")[:2])
    return room if room in ROOMS else flat_of(module)


def is_upwards(importer: str, imported: str) -> bool:
    """Whether a module imports one of a higher flat, or of a higher room of its own."""
    if flat_of(importer) != flat_of(imported):
        return FLATS.index(flat_of(imported)) < FLATS.index(flat_of(importer))
    rooms = room_of(importer), room_of(imported)
    return all(room in ROOMS for room in rooms) and ROOMS.index(rooms[1]) < ROOMS.index(rooms[0])


def imports(tree: ast.AST) -> list[str]:
    """Dotted names of what is imported, functions' own imports included; without those for type checkers alone."""
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
        return []
    if isinstance(tree, ast.ImportFrom):
        return [f"{tree.module}.{name.name}" for name in tree.names]
    if isinstance(tree, ast.Import):
        return [name.name for name in tree.names]
    return [name for child in ast.iter_child_nodes(tree) for name in imports(child)]


def test_all_folders_are_rooms_of_the_four_flats() -> None:
    assert sorted(FLATS[:-1]) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    assert sorted(ROOMS) == sorted(
        path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("*/*/__init__.py")
    )


@pytest.mark.parametrize("flat", FLATS)
def test_imports_go_downwards(flat: str) -> None:
    """But those of the package itself: of the hook that rewrites megatron-core, and of the command line it runs as."""
    upwards = []
    for path in (PACKAGE / flat).glob("**/*.py" if flat else "[!_]*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for name in imports(ast.parse(path.read_text())):
            if name.startswith("nemo_style_aligner.") and is_upwards(module, name.removeprefix("nemo_style_aligner.")):
                upwards.append(f"{module} imports {name}")
    assert not upwards


def test_omegaconfs_configs_end_in_config_and_jobs() -> None:
    """Below, functions take sections, whose keys mypy knows."""
    using = [path.relative_to(PACKAGE) for path in PACKAGE.glob("**/*.py") if "DictConfig" in path.read_text()]
    assert {path.parent.as_posix() for path in using} == {"trainer/config", "trainer/jobs"}


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
    "tools/cli": 10, "tools/evaluation": 201, "tools/reports": 35, "tools/placement": 42, "tools/serving": 114,
    "trainer/jobs": 219, "trainer/rl": 170, "trainer/training": 102, "trainer/services": 94, "trainer/models": 91,
    "trainer/checkpoints": 40, "trainer/data": 36, "trainer/launch": 32, "trainer/telemetry": 20, "trainer/config": 15,
    "engine/serving": 66, "engine/embedded": 37, "engine/trtllm": 22, "engine/weights": 24, "engine/text": 25,
    "engine/native": 6, "engine/parallel": 5, "engine": 37, "guard": 10, "": 4,
}  # fmt: skip


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_loads_few_others(room: str) -> None:
    imported = imported_files(of_functions=False)
    loaded = {
        module: len([name for name in reached(module, imported) if files()[name].name != "__init__.py"])
        for module in imported
        if module != "nemo_style_aligner.__main__"
        and room_of(module.removeprefix("nemo_style_aligner").lstrip(".")) == room
    }
    assert loaded
    assert {module: count for module, count in loaded.items() if count > BUDGETS[room]} == {}


def test_every_room_has_a_budget() -> None:
    assert BUDGETS.keys() == {*ROOMS, *FLATS} - {"tools", "trainer"}


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
