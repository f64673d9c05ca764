"""Changes single lines of the package and looks whether its tests notice: `make mutants`.

Each mutant is a copy of the package in a temporary folder with one expression changed: another comparison, a sign, an
operand, a constant, a condition that is negated, a statement that is left out. The tests that concern its file are
those whose files import its module, those named after it first; the first failure ends them. What no test notices is
printed, as a diff; the status is their number.

    python tests/mutants.py --count 60 --seed 1
    python tests/mutants.py --at nemo_style_aligner/trainer/rl/experience.py:225 --count 3
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import functools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = "nemo_style_aligner"
FOLDERS = ("rl", "models", "engine/embedded", "checkpoints", "services")
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARISONS |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr}
OPERATORS |= {ast.FloorDiv: ast.Mult, ast.BitOr: ast.BitAnd, ast.Mod: ast.Mult}


class Mutant(NamedTuple):
    """A file with one change: its path below the repository's root, the line, and the whole text."""

    path: str
    line: int
    text: str


Node = ast.expr | ast.stmt


def changes(node: ast.AST) -> Iterator[tuple[Node, str]]:
    """What of a node may be replaced, and by what."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield node, _with(node, ops=[COMPARISONS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and ast.unparse(node.right) != "None":  # a type
        yield node, f"({ast.unparse(node.left)})"
        yield node, _with(node, op=OPERATORS[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield node, _with(node, op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value not in (0, 1):
        yield node, repr(node.value + 1)
    elif isinstance(node, ast.AugAssign):
        yield node, f"{ast.unparse(node.target)} = {ast.unparse(node.value)}"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "pass"


def _with(node: ast.expr, **fields: Any) -> str:
    for name, value in fields.items():
        setattr(changed := copy.deepcopy(node), name, value)
    return f"({ast.unparse(changed)})"


def mutants_of(path: str) -> list[Mutant]:
    """All mutants of a file, of parts that stand on one line; messages and logs are left as they are."""
    source = (ROOT / path).read_text()
    lines = source.splitlines(keepends=True)
    found = []
    for node, text in (change for whole in ast.walk(ast.parse(source)) for change in changes(whole)):
        said = lines[node.lineno - 1].strip()
        if said.startswith(("logger.", "raise", 'f"', '"')) or node.lineno != node.end_lineno:
            continue
        row = lines[node.lineno - 1].encode()
        row = row[: node.col_offset] + text.encode() + row[node.end_col_offset :]
        whole_text = "".join([*lines[: node.lineno - 1], row.decode(), *lines[node.lineno :]])
        if _compiles(whole_text):
            found.append(Mutant(path, node.lineno, whole_text))
    return found


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def tests_of(path: str, most: int) -> list[str]:
    """Test files that import a file's module, those named after it first, then those that import few.

    If none does, those that import a module which imports it.
    """
    tests = users_of(path, "tests/test_*.py")
    if not tests:
        users = users_of(path, f"{PACKAGE}/**/*.py")
        tests = list(dict.fromkeys(test for user in users for test in users_of(user, "tests/test_*.py")))
    name = Path(path).stem
    by_name_and_weight = sorted(tests, key=lambda t: (name not in t, (ROOT / t).read_text().count(f"from {PACKAGE}")))
    return by_name_and_weight[:most]


@functools.cache
def users_of(path: str, files: str) -> list[str]:
    """Files that import a file's module."""
    package, _, name = path.removesuffix(".py").replace("/", ".").rpartition(".")
    imported = re.compile(rf"^ *from {re.escape(package)}(\.{name} import| import .*\b{name}\b)", re.MULTILINE)
    found = (file for file in sorted(ROOT.glob(files)) if imported.search(file.read_text()))
    return [str(file.relative_to(ROOT)) for file in found]


@functools.cache
def passes(tests: tuple[str, ...], mutant: Mutant, seconds: float) -> bool:
    """Whether the tests pass with the mutant in the file's place."""
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        for name in (PACKAGE, "tests", "examples", "docs", "conf"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copyfile(ROOT / "pyproject.toml", Path(folder) / "pyproject.toml")
        (Path(folder) / mutant.path).write_text(mutant.text)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {"PYTHONPATH": folder}
        try:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return False  # it hangs, which somebody notices
        return done.returncode == 0


def main() -> int:
    """Try mutants; the number of those that survive."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=60, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="of their choice")
    parser.add_argument("--at", help="PATH[:LINE] of all of them, in place of a choice among the folders")
    parser.add_argument("--files", type=int, default=3, help="test files for each")
    parser.add_argument("--seconds", type=float, default=300, help="for its tests")
    options = parser.parse_args()
    place, _, line = (options.at or "").partition(":")
    folders = [ROOT / PACKAGE / folder for folder in FOLDERS]
    paths = [place] if place else [str(f.relative_to(ROOT)) for folder in folders for f in sorted(folder.rglob("*.py"))]
    found = [mutant for path in paths if tests_of(path, 1) for mutant in mutants_of(path)]
    found = [mutant for mutant in found if not line or mutant.line == int(line)]
    chosen = random.Random(options.seed).sample(found, min(options.count, len(found)))
    survivors = 0
    for number, mutant in enumerate(chosen, 1):
        tests, as_it_is = tuple(tests_of(mutant.path, options.files)), (ROOT / mutant.path).read_text()
        if passes(tests, mutant, options.seconds):
            said, survivors = f"SURVIVES {' '.join(tests)}", survivors + 1
        else:  # what fails without the change says nothing
            said = (
                "noticed"
                if passes(tests, Mutant(mutant.path, 0, as_it_is), options.seconds)
                else "NOT TRIED: tests fail"
            )
        print(f"{number}/{len(chosen)} {mutant.path}:{mutant.line} {said}", flush=True)
        rows = difflib.unified_diff(as_it_is.splitlines(), mutant.text.splitlines(), n=0, lineterm="")
        print("\n".join(row for row in rows if row[:2] not in ("--", "++", "@@")), flush=True)
    print(f"{survivors} of {len(chosen)} mutants were noticed by no test")
    return min(survivors, 125)


if __name__ == "__main__":
    sys.exit(main())
