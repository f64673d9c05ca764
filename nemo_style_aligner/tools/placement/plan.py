"""The plan of a run: which jobs it has, on how many nodes and devices, with which settings, and which serves which.

A plan is a YAML file; docs/launching.md has one. Launchers print it (`placement.launch`); none of them changes a job.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.parsing import parse_yaml, read_bytes
from nemo_style_aligner.guard.secret import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, make_secret
from nemo_style_aligner.places import SCRIPTS
from nemo_style_aligner.trainer.config.command_line import compose
from nemo_style_aligner.trainer.config.fields import Given, Section, fields_of, of
from nemo_style_aligner.trainer.config.job_config import JobConfig
from nemo_style_aligner.trainer.config.loading import ConfigError, check_config
from nemo_style_aligner.trainer.config.schema import JOBS, Count, fields_of_job
from nemo_style_aligner.trainer.config.section_names import names_of

_NAME = r"(?!secret$)[a-z][a-z0-9_]*"
_REFERENCE = re.compile(r"\{([\w-]+)\.(host|port|listen)\}")  # also to what is no job's name, which is refused
# What the plan itself says, and so no override may.
_MAX_BYTES = 1 << 20
_SAID_BY = {
    "trainer.num_nodes": "nodes",
    "trainer.devices": "devices",
    "exp_manager.explicit_log_dir": "results_dir",
}


class PlanError(UserError):
    """A plan that cannot be; the message has all reasons, each with its place in the file and what to do."""


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a service is: ``host`` and ``port`` for its clients, and the address on which it listens."""

    host: str
    port: int
    listen: str


@dataclasses.dataclass(frozen=True)
class _Wiring:
    """How a service's script is told its port and address, and how its client is told of them."""

    own: tuple[str, ...]
    client: tuple[str, ...]


_REWARD_KEYS = ("remote_critic_rm.reward_model.ip={host}", "remote_critic_rm.reward_model.port={port}")
_SERVICES: Mapping[str, _Wiring] = {
    "serve_ppo_critic.py": _Wiring(
        ("trainer.ppo.port={port}", "trainer.ppo.host={listen}"),
        ("remote_critic_rm.critic.ip={host}", "remote_critic_rm.critic.port={port}"),
    ),
    "serve_reward_model.py": _Wiring(("inference.port={port}", "inference.host={listen}"), _REWARD_KEYS),
    "serve_reward_function.py": _Wiring(("--port", "{port}", "--host", "{listen}"), _REWARD_KEYS),
}
_WITHOUT_CONFIG = ("serve_reward_function.py",)  # has options of its own, and one process
_QUEUE = "trainer.ppo.batch_iterator.port"  # of an actor, which nobody else needs to know: two plans may share a node
_CONFIGS = {script[0]: name for name, job in JOBS.items() if (script := re.search(r"\w+\.py", job.title))}


class PlannedJob(Section):
    script: Given[str] = of(None)  # name of an entry script in examples/nlp/gpt, or the path of another
    nodes: Count = 1  # machines
    devices: Count = 1  # ranks on each of them
    # Config keys and their values. In texts {NAME.host} and {NAME.port} are the address of the service NAME.
    overrides: dict[str, Any] = of({})
    arguments: list[str] = of([])  # what else is on its command line, after them
    # Names of the jobs that ask this one over HTTP, or of one. A job that serves is ended when they have ended.
    serves: list[str] = of([])
    env: dict[str, str] = of({})  # environment variables of its ranks, beside those of the launcher

    @property
    def path(self) -> Path:
        """Of the script."""
        return Path(self.script).absolute() if os.sep in self.script else SCRIPTS / self.script

    @property
    def config(self) -> str | None:
        """The name of the script's config in ``conf/``; None of a script of the user's, whose config is not known."""
        return _CONFIGS.get(self.script)

    @property
    def has_config(self) -> bool:
        """Whether the script is a job with a config, not one with options of its own."""
        return self.script not in _WITHOUT_CONFIG

    @property
    def wiring(self) -> _Wiring | None:
        """How a service that is known hands its address over."""
        return _SERVICES.get(self.script)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The jobs of a run by name, and the folder, shared by all nodes, that they write to."""

    results_dir: Path
    jobs: Mapping[str, PlannedJob]

    def trainers(self) -> list[str]:
        """The jobs that serve nobody: the run is done when they are."""
        return [name for name, job in self.jobs.items() if not job.serves]

    def services(self) -> list[str]:
        """The others."""
        return [name for name, job in self.jobs.items() if job.serves]

    def log_dir(self, name: str) -> Path:
        """Where a job writes."""
        return self.results_dir / name

    def arguments(self, name: str) -> list[str]:
        """The command line of a job after its script, with references to services (`fill`) left as they are."""
        job = self.jobs[name]
        given = [f"{key}={literal(value)}" for key, value in job.overrides.items()]
        placed: list[str] = []
        if job.has_config:
            placed += [f"trainer.num_nodes={job.nodes}", f"trainer.devices={job.devices}"]
            placed += [f"exp_manager.explicit_log_dir={literal(str(self.log_dir(name)))}"]
        if job.config is not None and _QUEUE in fields_of_job(job.config):
            placed.append(f"{_QUEUE}=0")
        if job.wiring is not None:
            placed += _named(job.wiring.own, name)
        for service in self.services():
            wiring = self.jobs[service].wiring
            if name in self.jobs[service].serves and wiring is not None and service not in _referred(job):
                placed += _named(wiring.client, service)
        if job.config is not None:
            placed = [names_of(job.config).translated(argument) for argument in placed]
        return [*placed, *given, *job.arguments]

    def command(self, name: str, addresses: Mapping[str, Address]) -> list[str]:
        """The arguments of the Python interpreter that runs a rank of a job."""
        return ["-u", str(self.jobs[name].path), *(fill(argument, addresses) for argument in self.arguments(name))]

    def environment(self, name: str) -> dict[str, str]:
        """What a job's ranks need in their environment: where the secret is, and what the plan says."""
        return {TOKEN_FILE_VARIABLE: str(self.secret), TOKEN_VARIABLE: "", **self.jobs[name].env}

    def make_secret(self) -> None:
        """Make the folder of the results and, in it, the secret that the jobs share, unless they are there."""
        self.results_dir.mkdir(parents=True, exist_ok=True)
        make_secret(self.secret)

    @property
    def secret(self) -> Path:
        """The file with what the jobs have to know to talk to each other."""
        return self.results_dir / "secret"

    def content(self) -> dict[str, Any]:
        """What `plan_of` makes this plan of: without defaults."""
        fields = {name: vars(job) for name, job in self.jobs.items()}
        jobs = {n: {key: value for key, value in job.items() if value not in ({}, [], 1)} for n, job in fields.items()}
        return {"results_dir": str(self.results_dir), "jobs": jobs}

    def write(self, path: Path, comment: str = "") -> None:
        """Write the plan's file; ``comment``: lines at its top."""
        lines = "".join(f"# {line}\n" for line in comment.splitlines())
        path.write_text(lines + yaml.safe_dump(self.content(), sort_keys=False, width=120), encoding="utf-8")


def fill(argument: str, addresses: Mapping[str, Address]) -> str:
    """An argument with the addresses of services in place of ``{NAME.host}``, ``{NAME.port}``, ``{NAME.listen}``."""
    return _REFERENCE.sub(lambda found: str(getattr(addresses[found[1]], found[2])), argument)


def read_plan(path: Path) -> Plan:
    """The plan in a file.

    Raises:
        PlanError: it cannot be read, or cannot be carried out.
    """
    try:
        if path.exists() and not path.is_file():
            raise PlanError(f"the plan {path} is no file")
        with path.open("rb") as stream:
            text = read_bytes(stream, "the file", _MAX_BYTES).decode()
        parse_yaml(text)  # for its limits
        content = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))  # no key twice; 1e-5 is a number
    except OSError as error:
        raise PlanError(f"the plan {path} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise PlanError(f"the plan {path} is not YAML: {' '.join(str(error).split())}") from error
    try:
        return plan_of(content)
    except PlanError as error:
        raise PlanError(f"the plan {path}:\n{error}") from error


def plan_of(content: Any) -> Plan:
    """The plan that plain values describe, as a file has them.

    Raises:
        PlanError: they describe none; one line for each reason.
    """
    problems = [*_unfit(content, _File, "")]
    jobs: dict[str, PlannedJob] = {}
    given: dict[Any, Any] = {} if problems else content["jobs"]
    for name, keys in given.items():
        if isinstance(keys, dict) and isinstance(keys.get("serves"), str):
            keys = {**keys, "serves": [keys["serves"]]}
        if not isinstance(name, str) or not re.fullmatch(_NAME, name):
            problems.append(f"jobs.{name}: name a job by lower-case letters, digits and _, as it names its folder")
        elif found := [*_unfit(keys, PlannedJob, f"jobs.{name}.")]:
            problems += found
        else:
            jobs[name] = PlannedJob(**keys)
    if not problems:
        plan = Plan(Path(str(content["results_dir"])).expanduser().absolute(), jobs)
        problems += _contradictions(plan)
    if problems:
        raise PlanError("\n".join(f"  {problem}" for problem in problems))
    return plan


class _File(Section):
    results_dir: Given[str]
    jobs: Given[dict[str, Any]]


def _unfit(content: Any, section: type[Section], place: str) -> Iterator[str]:
    """What is wrong with the keys of a mapping and the types of their values."""
    fields = fields_of(section)
    if not isinstance(content, dict):
        yield f"{place.rstrip('.') or 'the file'}: {content!r} is no mapping with {', '.join(fields)}"
        return
    for key, value in content.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            yield f"{place}{key}: no such key" + (f"; did you mean {near[0]}?" if near else f": {', '.join(fields)}")
        elif problem := fields[key].problem(f"{place}{key}", value):
            yield problem
        elif key in _TEXTS and not all(isinstance(part, str) for part in _parts(value)):
            yield f"{place}{key}: all in it must be texts: put numbers in quotes"
    yield from (f"{place}{key}: missing" for key, field in fields.items() if field.must_be_given and key not in content)


_TEXTS = ("arguments", "serves", "env")


def _parts(value: list[Any] | dict[Any, Any]) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else value


def _contradictions(plan: Plan) -> Iterator[str]:
    """What the jobs say together and cannot be."""
    if not str(plan.results_dir).isprintable():
        yield f"results_dir: {str(plan.results_dir)!r} has a character that cannot be printed"
    if not plan.trainers():
        yield "jobs: one must serve nobody: the run is done when that has ended"
    for name, job in plan.jobs.items():
        place = f"jobs.{name}"
        if not job.path.is_file():
            near = difflib.get_close_matches(job.script, [path.name for path in SCRIPTS.glob("*.py")], n=1)
            yield f"{place}.script: {job.path}: no such file" + (f"; did you mean {near[0]}?" if near else "")
        yield from _double(job, place)
        for other in job.serves:
            if other not in plan.trainers() or other == name:
                yield f"{place}.serves: {other} is none of the jobs that serve nobody: {', '.join(plan.trainers())}"
        if job.wiring is not None and not job.serves:
            yield f"{place}: {job.script} is a service: say in {place}.serves whom it serves"
        yield from _lost_addresses(plan, name)
        for other in _referred(job) - {*plan.services()}:
            yield f"{place}: {{{other}.host}} or {{{other}.port}}: no job {other} of this plan serves another"
    yield from _common_keys(plan)


FindProblems = Callable[[str, JobConfig, int], list[str]]
"""(a config's name, a config, the job's number of ranks) -> the second round of a job's checks, a line for each."""


def check_configs(plan: Plan, find_problems: FindProblems | None = None) -> None:
    """Check the settings of all jobs as each job would at its start.

    Args:
        plan: whose paths are this machine's.
        find_problems: the second round of a job's checks, of models and data; None: it is left to the jobs.

    Raises:
        PlanError: a job would refuse them; all reasons of all jobs.
    """
    nowhere = dict.fromkeys(plan.services(), Address("localhost", 1, "localhost"))
    problems = []
    for name, job in plan.jobs.items():
        arguments = [fill(argument, nowhere) for argument in plan.arguments(name)]
        if job.config is None:
            found = [] if job.has_config or find_problems is None else _missing_files(arguments)
        else:
            found = _refused(job.config, arguments, job.nodes * job.devices, find_problems)
        problems += [f"  jobs.{name}: {line}" for line in found]
    if problems:
        raise PlanError("the plan's settings:\n" + "\n".join(problems))


def _refused(config: str, arguments: Sequence[str], ranks: int, find_problems: FindProblems | None) -> list[str]:
    """Why a job with a config would refuse its command line, a line for each reason."""
    try:
        if (composed := compose(config, arguments=arguments)) is None:
            return [f"{' '.join(arguments)}: this command line starts no job"]
        check_config(composed.cfg, config)
        read = JOBS[config].sections.read(composed.cfg, composed.chosen)
        found = [] if find_problems is None else find_problems(config, read, ranks)
    except ConfigError as error:
        found = [str(error)]
    return [line for text in found for line in names_of(config).translated(text).splitlines()]


def _missing_files(arguments: Sequence[str]) -> list[str]:
    """What ``serve_reward_function.py`` would not find."""
    options = dict(itertools.pairwise(arguments))
    files = {name: options.get(name, "") for name in ("--function", "--tokenizer")}
    files["--function"] = files["--function"].rpartition(":")[0]
    return [f"{name} {options.get(name)}: no such file" for name, file in files.items() if not os.path.exists(file)]


def _double(job: PlannedJob, place: str) -> Iterator[str]:
    if not job.has_config and (job.overrides or (job.nodes, job.devices) != (1, 1)):
        yield f"{place}: {job.script} is one process and has no config: give its options in {place}.arguments"
    for key in job.overrides:
        if key in _SAID_BY:
            yield f"{place}.overrides.{key}: the plan's {_SAID_BY[key]} says it: leave it out"


def _lost_addresses(plan: Plan, name: str) -> Iterator[str]:
    """A service of the user's own whose address nobody passes on."""
    job = plan.jobs[name]
    if not job.serves or job.wiring is not None:
        return
    if name not in _referred(job):
        yield f"jobs.{name}: {job.script} must be told its port: put {{{name}.port}} in its overrides or arguments"
    for other in job.serves:
        if other in plan.jobs and name not in _referred(plan.jobs[other]):
            yield f"jobs.{other}: where does the address of {name} go? Put {{{name}.host}} and {{{name}.port}} there"


def _common_keys(plan: Plan) -> Iterator[str]:
    """Two services whose addresses would go to the same keys."""
    for client in plan.trainers():
        told: dict[tuple[str, ...], str] = {}
        for service in plan.services():
            wiring = plan.jobs[service].wiring
            is_told = client in plan.jobs[service].serves and service not in _referred(plan.jobs[client])
            if wiring is None or not is_told:
                continue
            if (first := told.setdefault(wiring.client, service)) != service:
                keys = wiring.client[0].partition("=")[0]
                yield (
                    f"jobs.{client}: {first} and {service} would both be its {keys}: say in its overrides where each "
                    f"address goes, as {{{service}.host}} and {{{service}.port}}"
                )


def _referred(job: PlannedJob) -> set[str]:
    """The jobs whose addresses a job's settings have."""
    return {found[1] for text in _texts([job.overrides, job.arguments]) for found in _REFERENCE.finditer(text)}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for part in value.values() for text in _texts(part))
    elif isinstance(value, Sequence):
        yield from (text for part in value for text in _texts(part))


def _named(arguments: Sequence[str], service: str) -> list[str]:
    """A wiring's arguments with references to this service."""
    return [re.sub(r"\{(host|port|listen)\}", rf"{{{service}.\1}}", argument) for argument in arguments]


def literal(value: Any) -> str:
    """A value as hydra's grammar of overrides has it, whatever is in it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{literal(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(literal, value)) + "]"
    if isinstance(value, str):
        if re.fullmatch(r"[A-Za-z_/][\w./-]*", value) and value.lower() not in ("null", "true", "false", "nan", "inf"):
            return value
        # Backslashes have a meaning before quotes only.
        quoted = re.sub(r"(\\*)'", r"\1\1\\'", value)
        return "'" + re.sub(r"(\\+)$", r"\1\1", quoted) + "'"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
