"""Another Unix user plants libraries, links, folders and locks where a job will come: none is loaded or followed.

Attacker and victim are real users without rights: processes of this one that have become them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.tensorboard  # noqa: F401  # here, as the users may not read where Python's packages are

from attack.conftest import ROUNDS
from nemo_style_aligner.engine.native.compilation import (
    NativeUnavailable,
    compilation_key,
    find_compiler,
    find_or_compile,
)
from nemo_style_aligner.guard import trusted_paths
from nemo_style_aligner.guard.secret import SecretError, make_secret, read_secret
from nemo_style_aligner.guard.trusted_paths import UntrustedPathError, own_folder, temporary_base
from nemo_style_aligner.guard.user_code import UserCodeError, load_function
from nemo_style_aligner.trainer.config.loading import ConfigError
from nemo_style_aligner.trainer.config.schema import ExpManager
from nemo_style_aligner.trainer.jobs.log_lock import LOCK_FILE, hold_log_directory
from nemo_style_aligner.trainer.jobs.path_checks import log_directory_problems
from nemo_style_aligner.trainer.launch.stop_signals import REQUEUE_FILE, write_requeue_file
from nemo_style_aligner.trainer.services.exactly_once.journal import CriticJournal
from nemo_style_aligner.trainer.services.exactly_once.ledger import CriticPosition
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger
from nemo_style_aligner.trainer.telemetry.watchdog import WATCHDOG_FOLDER, Watchdog

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="NOT TESTED: what other users of this machine can plant; only root can become two of them"
)

STRANGER, VICTIM, TEAM = 64001, 64002, 64003
SOURCE = '#include <cstdio>\nextern "C" int answer() { return ANSWER; }\n'
EVIL = (
    "#include <cstdio>\n#include <unistd.h>\n"
    '__attribute__((constructor)) static void run() { fclose(fopen(MARKER, "w")); }\n'
    'extern "C" int answer() { return 666; }\n'
)


def as_user(user: int, action: Callable[[], Any], groups: tuple[int, ...] = ()) -> Any:
    """What ``action`` returns in a process of this user; it may be an exception, which is raised."""
    faulthandler.cancel_dump_traceback_later()  # pytest's; the forked process could never end its thread
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(50)
        with contextlib.suppress(BaseException):
            os.close(receive)
            _become(user, groups)
            try:
                result = action()
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller expects or reports it
                result = type(error)(str(error)) if not isinstance(error, OSError) else error
            with open(send, "wb") as file:
                pickle.dump(result, file)
        os._exit(0)
    os.close(send)
    with open(receive, "rb") as file:
        content = file.read()
    status = os.waitpid(child, 0)[1]
    assert status == 0 and content, f"the process of user {user} ended with {os.waitstatus_to_exitcode(status)}"
    result = pickle.loads(content)
    if isinstance(result, BaseException):
        raise result
    return result


def _become(user: int, groups: tuple[int, ...] = ()) -> None:
    os.setgroups(list(groups))
    os.setgid(user)
    os.setuid(user)
    os.umask(0o022)


@contextlib.contextmanager
def beside(user: int, action: Callable[[], Any]) -> Iterator[None]:
    """``action``, again and again, in a process of this user."""
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        with contextlib.suppress(BaseException):
            _become(user)
            while True:
                action()
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.fixture
def ground() -> Iterator[Path]:
    """A folder that all users may enter; in it one that all may write to, as /tmp, and one of a team's."""
    folder = Path(tempfile.mkdtemp(prefix="neighbours_"))
    (folder / "shared").mkdir()
    (folder / "team").mkdir()
    (folder / "home").mkdir(0o700)
    os.chown(folder / "home", VICTIM, VICTIM)
    os.chown(folder / "team", 0, TEAM)
    for name, mode in (("", 0o755), ("shared", 0o1777), ("team", 0o2775)):
        (folder / name).chmod(mode)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def precious(ground: Path) -> Iterator[Path]:
    """A file of the victim's, which nothing may change."""
    path = ground / "home" / "precious"
    path.write_text("precious")
    os.chown(path, VICTIM, VICTIM)
    yield path
    assert path.read_text() == "precious" and path.parent.stat().st_mode & 0o777 == 0o700


# ---- compiled libraries ------------------------------------------------------------------------


class Library:
    """A small library as the engine compiles them, and what the stranger has in its place."""

    def __init__(self, ground: Path) -> None:
        self.marker = ground / "shared" / "the stranger's code ran"
        self.source = ground / "step.cpp"
        self.source.write_text(SOURCE)
        self.command = [*find_compiler(), "-DANSWER=42"]
        self.evil = ground / "evil.so"
        (ground / "evil.cpp").write_text(EVIL)
        subprocess.run(
            [*find_compiler(), f'-DMARKER="{self.marker}"', "-fPIC", "-shared", ground / "evil.cpp", "-o", self.evil],
            check=True,
        )
        self.name = f"step-{compilation_key(self.command, [self.source])}.so"

    def plant(self, folder: Path) -> None:
        """A cache with the stranger's library in it."""
        native = folder / "nemo_style_aligner" / "native"
        native.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.evil, native / self.name)

    def load(self, cache: Path) -> int:
        """What the loaded library answers."""
        os.environ["NEMO_STYLE_ALIGNER_CACHE"] = str(cache)
        return int(find_or_compile(self.command, [self.source]).answer())


@pytest.fixture
def library(ground: Path) -> Library:
    return Library(ground)


COMPONENTS = ("a", "b", "nemo_style_aligner", "native")


@pytest.mark.parametrize(
    "way", ["folder", "open folder", "link", "link to the victim's", "in the victim's open folder"]
)
def test_no_planted_library_is_loaded(
    way: str, ground: Path, library: Library, attack_count: Callable[..., None]
) -> None:
    """Wherever between the root and the file the stranger's part begins."""
    refused = 0
    for number in range(len(COMPONENTS)):
        top = ground / "shared" / f"{number}"
        top.mkdir()
        place = top.joinpath(*COMPONENTS[: number + 1])
        above = list(reversed([*place.parents][: number + 1]))  # of which the last is open to everybody
        for folder in above:
            folder.mkdir(exist_ok=True)
            owner = VICTIM if way == "in the victim's open folder" else 0
            os.chown(folder, owner, owner)
        above[-1].chmod(0o777 if way == "in the victim's open folder" else 0o1777)
        mine = ground / "shared" / f"mine{number}"

        def plant(place: Path = place, mine: Path = mine, number: int = number) -> None:
            library.plant(mine)
            tree = mine.joinpath(*("a", "b", "nemo_style_aligner", "native")[2 : number + 1])  # its part from there on
            if "link" in way:
                place.symlink_to(tree)
            else:
                shutil.copytree(tree, place)
            if way == "open folder":
                place.chmod(0o777)

        as_user(STRANGER, plant)
        if way == "link to the victim's":  # a cache of its own, to which the stranger's link leads for now
            place.unlink()
            own = ground / "home" / f"cache{number}"
            as_user(VICTIM, lambda own=own: library.load(own))
            target = own.joinpath(*COMPONENTS[2 : number + 1])
            as_user(STRANGER, lambda place=place, target=target: place.symlink_to(target))
        cache = top / "a" / "b"
        with pytest.raises(NativeUnavailable, match=r"would be executed, but .* set NEMO_STYLE_ALIGNER_CACHE"):
            as_user(VICTIM, lambda cache=cache: library.load(cache))
        refused += 1
        assert not library.marker.exists()
    attack_count("libraries planted", tried=len(COMPONENTS), refused=refused)
    as_user(VICTIM, lambda: ctypes.CDLL(str(library.evil)).answer())
    assert library.marker.exists()  # the library does harm where it is loaded


def test_a_planted_file_in_a_folder_that_was_open_once_is_not_loaded(
    ground: Path, library: Library, attack_count: Callable[..., None]
) -> None:
    """The folder's owner has closed it since: its own code is compiled in the place of what lies there."""
    native = ground / "shared" / "cache" / "nemo_style_aligner" / "native"
    as_user(VICTIM, lambda: native.mkdir(parents=True))
    native.chmod(0o777)
    as_user(STRANGER, lambda: library.plant(native.parents[1]))
    native.chmod(0o755)
    assert as_user(VICTIM, lambda: library.load(native.parents[1])) == 42
    native.chmod(0o777)
    mine = ground / "shared" / "mine"
    as_user(STRANGER, lambda: library.plant(mine))
    (native / library.name).unlink()
    as_user(STRANGER, lambda: (native / library.name).symlink_to(mine / "nemo_style_aligner/native" / library.name))
    native.chmod(0o700)
    assert as_user(VICTIM, lambda: library.load(native.parents[1])) == 42
    assert not library.marker.exists() and native.stat().st_mode & 0o777 == 0o700
    attack_count("libraries planted", tried=2, refused=2)


def test_a_cache_of_ones_own_in_a_shared_folder_works(ground: Path, library: Library) -> None:
    """Made beforehand by nobody, or under another umask; and through links of the user's or root's own."""
    assert as_user(VICTIM, lambda: library.load(ground / "shared" / "new" / "cache")) == 42
    (ground / "linked").symlink_to("shared/new")
    as_user(VICTIM, lambda: (ground / "shared" / "own").symlink_to(ground / "linked" / ".." / "new"))
    for name in ("linked", "shared/own"):
        assert as_user(VICTIM, lambda name=name: library.load(ground / name / "cache")) == 42
    assert len([*ground.rglob("*.so")]) == 2  # the evil one and this


@pytest.mark.parametrize("parent", ["sticky", "open"])
def test_no_moment_between_check_and_use(
    parent: str, ground: Path, library: Library, attack_count: Callable[..., None]
) -> None:
    """While the victim loads, the stranger swaps the folder for a link to the victim's own good one, and back."""
    good, mine = ground / "home" / "good", ground / "shared" / "mine"
    as_user(VICTIM, lambda: library.load(good))
    top = ground / "shared" if parent == "sticky" else ground / "open"
    top.mkdir(exist_ok=True)
    top.chmod(0o1777 if parent == "sticky" else 0o777)
    place, link = top / "cache", top / "link"
    exchange = ctypes.CDLL(None).renameat2, (-100, str(place).encode(), -100, str(link).encode(), 2)

    def prepare() -> None:
        library.plant(mine)
        shutil.copytree(mine, place)
        link.symlink_to(good)

    def swap() -> None:
        function, arguments = exchange  # in one step: there is always something of the stranger's
        assert function(*arguments) == 0

    def load_often() -> tuple[int, int]:
        tried, deadline = 0, time.monotonic() + 1.0 * ROUNDS
        refused = 0
        while time.monotonic() < deadline:
            tried += 1
            try:
                assert library.load(place) == 42
            except NativeUnavailable:
                refused += 1
        return tried, refused

    as_user(STRANGER, prepare)
    if parent == "open":  # where it can put a folder of the victim's there as well
        as_user(VICTIM, lambda: shutil.copytree(good, top / "victims"))
        link.unlink()
        (top / "victims").rename(link)
    with beside(STRANGER, swap):
        tried, refused = as_user(VICTIM, load_often)
    assert tried == refused > 5 and not library.marker.exists()
    attack_count("folders swapped while a library is loaded", tried=tried, refused=refused)


# ---- log directories ---------------------------------------------------------------------------


def hold(log_dir: Path, seconds: float = 0.3) -> None:
    hold_log_directory(log_dir, "job", seconds)


def write_everything(log_dir: Path) -> list[str]:
    """What a job writes in its log directory, part by part; the errors."""
    errors = []

    def watch() -> None:
        watchdog = Watchdog(log_dir, 0, 1, 600, "run", lambda status: None)
        watchdog.start()
        watchdog.stop()

    def log() -> None:
        metrics = MetricsLogger(log_dir)
        metrics.log_metrics({"loss": 1.0}, 1)
        metrics.log_hyperparameters({"a": 1}, "a: 1\n")
        metrics.close()

    def keep() -> None:
        CriticJournal(log_dir / "critic_journal").begin_run(CriticPosition("run", 1, "initial"))

    for part in (lambda: hold(log_dir), lambda: write_requeue_file(log_dir, "why"), watch, log, keep):
        try:
            part()
        except (OSError, ConfigError, UntrustedPathError, RuntimeError) as error:
            errors.append(str(error))
    return errors


def names_written(log_dir: Path) -> list[str]:
    """Names of all files that a job makes in a new log directory, those on the way to them included."""
    assert write_everything(log_dir) == []
    names = [str(path.relative_to(log_dir)) for path in log_dir.rglob("*") if path.is_file()]
    unfinished = [".hyperparameters.yaml.tmp", f"{WATCHDOG_FOLDER}/rank_0.tmp", "critic_journal/run.json.unfinished"]
    assert {LOCK_FILE, REQUEUE_FILE, "metrics.jsonl", "critic_journal/run.json"} <= set(names)
    return [name for name in names if not name.startswith("tensorboard")] + unfinished


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o777, 0o1777, 0o2775])
def test_a_log_directory_that_a_stranger_made_is_refused(
    mode: int, ground: Path, precious: Path, attack_count: Callable[..., None]
) -> None:
    """Whatever links lie in it, and however deep the job's own folder would be in it."""
    names = as_user(VICTIM, lambda: names_written(ground / "shared" / "model"))
    place = ground / "shared" / "run"

    def prepare() -> None:
        place.mkdir()
        for name in names:
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).symlink_to(precious)
        (place / "empty").mkdir()
        (place / "link").symlink_to(ground / "home")
        for folder in (place, place / "empty"):
            folder.chmod(mode)

    as_user(STRANGER, prepare)
    (ground / "team" / "link").symlink_to(place)  # root's
    as_user(STRANGER, lambda: (ground / "shared" / "link").symlink_to(ground / "home"))
    tried = 0
    places = [place, place / "empty", place / "new" / "er", place / "link", place / "link" / "new"]
    for log_dir in [*places, ground / "shared" / "link" / "new", ground / "team" / "link"]:
        with pytest.raises(ConfigError, match=r"log directory .*run|link.*(safe from others|cannot be written)"):
            as_user(VICTIM, lambda log_dir=log_dir: hold(log_dir))
        section = ExpManager(explicit_log_dir=str(log_dir))
        assert as_user(VICTIM, lambda section=section: [*log_directory_problems(section)])
        tried += 1
    attack_count("log directories made beforehand", tried=tried, refused=tried)


def test_links_in_a_teams_folder_are_not_followed(
    ground: Path, precious: Path, attack_count: Callable[..., None]
) -> None:
    """A colleague may write there; whoever does plants links for each name that a job writes, one at a time."""
    names = as_user(VICTIM, lambda: names_written(ground / "shared" / "model"))
    os.chown(ground / "home", VICTIM, TEAM)
    os.chmod(ground / "home", 0o700)
    tried = 0
    kinds: list[Callable[[Path], Any]] = [lambda path: path.symlink_to(precious), os.mkfifo]
    for number, (name, kind) in enumerate(itertools.product(names, kinds)):
        log_dir = ground / "team" / f"run{number}"
        as_user(VICTIM, lambda log_dir=log_dir: log_dir.mkdir(), (TEAM,))
        log_dir.chmod(0o2775)

        def plant(path: Path = log_dir / name, kind: Callable[[Path], Any] = kind) -> None:
            path.parent.mkdir(exist_ok=True)
            if path.parent.name in (WATCHDOG_FOLDER, "critic_journal"):
                path.parent.chmod(0o777)
            kind(path)

        os.chown(log_dir, VICTIM, TEAM)
        log_dir.chmod(0o2775)
        as_user(STRANGER, plant, (TEAM,))
        as_user(VICTIM, lambda log_dir=log_dir: write_everything(log_dir), (TEAM,))
        assert precious.read_text() == "precious", name
        tried += 1
    attack_count("links and pipes in log directories", tried=tried, refused=tried)


def test_a_reader_keeps_no_job_out(ground: Path, attack_count: Callable[..., None]) -> None:
    log_dir = ground / "shared" / "run"
    as_user(VICTIM, lambda: hold(log_dir))
    with pytest.raises(PermissionError):
        as_user(STRANGER, lambda: os.open(log_dir / LOCK_FILE, os.O_RDONLY))
    attack_count("locks of readers", tried=1, refused=1)


def test_a_team_works_in_its_folder(ground: Path) -> None:
    """Each in directories of their own, below folders of root's or a colleague's; one they share is root's."""
    colleagues = ground / "team" / "colleague"
    as_user(STRANGER, lambda: colleagues.mkdir(), (TEAM,))
    colleagues.chmod(0o2775)
    assert as_user(VICTIM, lambda: write_everything(colleagues / "run"), (TEAM,)) == []
    assert as_user(VICTIM, lambda: write_everything(ground / "team" / "run"), (TEAM,)) == []
    shared = ground / "team" / "both"
    shared.mkdir()
    os.chown(shared, 0, TEAM)
    shared.chmod(0o2775)
    for user in (STRANGER, VICTIM, STRANGER):
        as_user(user, lambda: hold(shared), (TEAM,))  # one after the other
    assert (shared / LOCK_FILE).stat().st_mode & 0o777 == 0o660
    with pytest.raises(ConfigError, match=r"colleague belongs to user 64001.*resume_from_checkpoint"):
        as_user(VICTIM, lambda: hold(colleagues), (TEAM,))


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o755])
def test_a_journal_lies_in_no_folder_of_others(mode: int, ground: Path, attack_count: Callable[..., None]) -> None:
    """It holds prompts, responses, and what a critic is trained on again."""
    log_dir = ground / "shared" / "run"
    as_user(VICTIM, log_dir.mkdir)
    log_dir.chmod(0o777)
    as_user(STRANGER, lambda: (log_dir / "critic_journal").mkdir())
    (log_dir / "critic_journal").chmod(mode)
    log_dir.chmod(0o755)

    def keep() -> None:
        CriticJournal(log_dir / "critic_journal").begin_run(CriticPosition("run", 1, "initial"))

    with pytest.raises(RuntimeError, match="would not be safe from others"):
        as_user(VICTIM, keep)
    os.chown(log_dir / "critic_journal", VICTIM, VICTIM)
    if mode == 0o755:  # an earlier version's, under another umask
        as_user(VICTIM, keep)
        assert (log_dir / "critic_journal").stat().st_mode & 0o777 == 0o700
    else:
        with pytest.raises(RuntimeError, match="is writable by others"):
            as_user(VICTIM, keep)
    attack_count("journals in others' folders", tried=2, refused=1 + (mode != 0o755))


# ---- what else is read or written where others may be ------------------------------------------


def test_secrets_functions_and_temporary_files(
    ground: Path, precious: Path, monkeypatch: pytest.MonkeyPatch, attack_count: Callable[..., None]
) -> None:
    shared, mine = ground / "shared", ground / "shared" / "mine"
    secret = as_user(VICTIM, lambda: make_secret(ground / "home" / "token").value)

    def plant() -> None:
        mine.mkdir()
        (mine / "token").symlink_to(ground / "home" / "token")
        (mine / "reward.py").write_text("def reward(prompt, response, line):\n    return 1.0\n")
        (shared / "token").symlink_to(ground / "home" / "token")
        (shared / "reward.py").symlink_to(mine / "reward.py")

    as_user(STRANGER, plant)
    for path in (shared / "token", mine / "token"):
        with pytest.raises(SecretError, match=f"{path.parent}.* belongs to user {STRANGER}"):
            as_user(VICTIM, lambda path=path: read_secret(path))
    with pytest.raises(SecretError, match="cannot be made"):
        as_user(VICTIM, lambda: make_secret(mine / "new" / "token"))
    as_user(VICTIM, lambda: (ground / "home" / "link").symlink_to("token"))
    assert as_user(VICTIM, lambda: read_secret(ground / "home" / "link").value) == secret

    as_user(VICTIM, lambda: (shared / "own.py").write_text("def reward(prompt, response, line):\n    return 1.0\n"))
    takes = ["prompt", "response", "line"]
    for name in ("reward.py", "own.py", "mine/reward.py"):  # own.py: what it imports would be looked for beside it
        with pytest.raises(UserCodeError, match="would be executed, but"):
            as_user(VICTIM, lambda name=name: load_function(f"{shared / name}:reward", "rewards", takes) and None)
    as_user(VICTIM, lambda: shutil.copytree(mine, ground / "home" / "own", symlinks=True))
    as_user(VICTIM, lambda: load_function(f"{ground}/home/own/reward.py:reward", "rewards", takes) and None)

    (ground / "open").mkdir()
    (ground / "open").chmod(0o777)
    for folder, is_refused in ((ground / "open", True), (mine, True), (shared, False)):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with pytest.raises(UntrustedPathError, match="set TMPDIR") if is_refused else contextlib.nullcontext():
            as_user(VICTIM, temporary_base)
    attack_count("secrets, functions, temporary files", tried=8, refused=8)


def test_groups_and_lists_of_who_may_write(ground: Path, attack_count: Callable[..., None]) -> None:
    """Code in a folder that a group may write to is not executed; a group of one is none."""
    folder = ground / "cache"
    as_user_error = pytest.raises(UntrustedPathError, match=f"is writable by others of group {TEAM}: chmod g-w")
    folder.mkdir()
    os.chown(folder, VICTIM, TEAM)
    folder.chmod(0o775)
    with as_user_error:
        as_user(VICTIM, lambda: own_folder(folder / "new", strict=True, make=0o700))
    folder.chmod(0o1775)  # nobody can replace what the victim makes there
    as_user(VICTIM, lambda: own_folder(folder / "new", strict=True, make=0o700))
    with as_user_error:
        as_user(VICTIM, lambda: own_folder(folder, strict=True))
    (ground / "roots").mkdir()
    (ground / "roots").chmod(0o775)  # group 0's
    own_folder(ground / "roots", strict=True)
    with pytest.raises(OSError) as circle:
        (ground / "circle").symlink_to(ground / "circle")
        trusted_paths.trusted_path(ground / "circle")
    assert circle.value.errno == errno.ELOOP
    attack_count("folders of groups", tried=2, refused=2)
