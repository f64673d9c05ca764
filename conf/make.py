"""Write this folder's YAML files and ``docs/config.md`` from the schema: ``python conf/make.py``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_style_aligner.tools.placement.plan import PlannedJob
from nemo_style_aligner.trainer.config.fields import Field, Section, fields_of, hints_of, section_of
from nemo_style_aligner.trainer.config.schema import JOBS, fields_of_job
from nemo_style_aligner.trainer.config.section_names import names_of

REFERENCE = """# Config keys

Every key of every job, as `conf/*.yaml` have them; on the command line a key is `section.key=value`. Jobs are named as
their files, without `gpt_`; their names stand beside a key or a default that not all jobs of the section share. A run
that is started again may have another value in a key marked ↻; in any other, too, but then a warning says that results
differ. {names}

Made from `nemo_style_aligner/trainer/config/schema.py` by `python conf/make.py`.
"""

HEADER = "| key | value | default | what |\n| --- | --- | --- | --- |"

HEAD = """# {title}
#
# Keys and defaults are NeMo-Aligner's, apart from keys of this project's own and the defaults that
# docs/from_nemo_aligner.md lists. Sizes are counted over all ranks unless said otherwise; "per rank" means per
# data-parallel rank. Made from nemo_style_aligner/trainer/config/schema.py by conf/make.py.

"""


def yaml_of(job: str) -> str:
    """The YAML file of a job."""
    lines = "\n".join(_lines(JOBS[job].sections, fields_of_job(job)))
    text = re.sub(r"\n\n+", "\n\n", lines.strip())
    for name, own in names_of(job).own.items():
        indent = "  " * name.count(".")
        text = re.sub(rf"^{indent}{name.split('.')[-1]}:", f"{indent}{own.split('.')[-1]}:", text, flags=re.MULTILINE)
    return HEAD.format(title=JOBS[job].title) + names_of(job).translated(text) + "\n"


@dataclasses.dataclass
class Key:
    """What the jobs that have a key say of it.

    Attributes:
        defaults: job -> default; several only where jobs differ.
    """

    name: str
    field: Field
    comment: str
    defaults: dict[str, str]


def reference() -> str:
    """``docs/config.md``: a table of keys for each section of any job."""
    sections: dict[str, dict[tuple[str, str], Key]] = {}
    jobs_of: dict[str, list[str]] = {}
    for job, kind in JOBS.items():
        for prefix, name, field, comment in _keys(kind.sections, fields_of_job(job)):
            keys = sections.setdefault(prefix, {})
            if job not in jobs_of.setdefault(prefix, []):
                jobs_of[prefix].append(job)
            if field.kinds != (dict,) or field.is_open:
                written = _written(field.default)
                keys.setdefault((name, comment), Key(name, field, comment, {})).defaults[job] = written
    renamed = {own: name for job in JOBS for name, own in names_of(job).own.items()}
    names = ", ".join(f"`{own}` is `{name}`" for own, name in renamed.items())
    text = [REFERENCE.format(names=f"Of REINFORCE and best of n, {names} below.")]
    for prefix, keys in sections.items():
        if keys:
            rows = (_row(key, jobs_of[prefix]) for key in keys.values())
            head = f"## {prefix or 'Top level'}\n\nIn {_named(jobs_of[prefix])}.\n"
            text.append("\n".join([head, HEADER, *rows, ""]))
    of_plan = [*_keys(PlannedJob, fields_of(PlannedJob))]
    rows = (_row(Key(name, field, comment, {"": _written(field.default)}), [""]) for _, name, field, comment in of_plan)
    return "\n".join(
        [*text, f"## A job of a plan\n\nOf the file that `nsa launch` reads (launching.md).\n\n{HEADER}", *rows, ""]
    )


def _keys(
    section: type[Section], fields: Mapping[str, Field], prefix: str = ""
) -> Iterator[tuple[str, str, Field, str]]:
    """Prefix, name, field and comment of each key, sections first named and then opened."""
    comments = _comments(section)
    for name, hint in hints_of(section).items():
        if (field := fields.get(f"{prefix}{name}")) is None:
            continue
        above, beside = comments[name]
        comment = " ".join(filter(None, (line.strip(" #") for line in [*above, beside])))
        yield prefix.rstrip("."), name, field, comment
        if (nested := section_of(hint)) is not None:
            yield from _keys(nested, fields, f"{prefix}{name}.")
        elif field.element is not None and issubclass(field.element, Section):
            place = f"{prefix}{name}[*]."
            listed = {f"{place}{key}": of_element for key, of_element in fields_of(field.element).items()}
            yield from _keys(field.element, listed, place)


def _named(jobs: Iterable[str]) -> str:
    """Names of jobs, or of those that are missing."""
    names = [job.removeprefix("gpt_") for job in jobs]
    absent = [job.removeprefix("gpt_") for job in JOBS if job.removeprefix("gpt_") not in names]
    if len(absent) > 2:
        return ", ".join(names)
    return f"all but {' and '.join(absent)}" if absent else "all jobs"


def _row(key: Key, jobs: list[str]) -> str:
    """A line of a table: what may be given, what is the default and where, what it means."""
    kinds = {bool: "True, False", int: "whole number", float: "number", str: "text", list: "list", dict: "section"}
    value = ", ".join(f"`{choice}`" for choice in key.field.choices) or " or ".join(
        kinds[kind] for kind in key.field.kinds
    )
    if key.field.range is not None:
        value += f": {key.field.range}"
    if key.field.is_nullable:
        value += ", null"
    first, *others = dict.fromkeys(key.defaults.values())
    where = "" if len(key.defaults) == len(jobs) else f" ({_named(key.defaults)})"
    default = f"`{first}`{where if not others else ''}" + "".join(
        f"; `{other}`: {_named(job for job, written in key.defaults.items() if written == other)}" for other in others
    )
    cells = f"`{key.name}`{' ↻' if key.field.may_change else ''}", value, default, key.comment
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


def _lines(section: type[Section], fields: Mapping[str, Field], prefix: str = "", indent: str = "") -> Iterator[str]:
    comments = _comments(section)
    for name, hint in hints_of(section).items():
        if (field := fields.get(f"{prefix}{name}")) is None:  # this job has no such key
            continue
        above, beside = comments[name]
        yield from (f"{indent}{line}".rstrip() for line in ([""] if not prefix else []) + above)
        nested = section_of(hint) if field.is_section else None
        value = "" if nested is not None else f" {_written(field.default)}"
        yield f"{indent}{name}:{value}{beside}"
        if nested is not None:
            yield from _lines(nested, fields, f"{prefix}{name}.", f"{indent}  ")


@functools.cache
def _comments(section: type[Section]) -> Mapping[str, tuple[list[str], str]]:
    """The comment lines above each key, blank lines among them, and the comment beside it."""
    comments: dict[str, tuple[list[str], str]] = {}
    for part in reversed(section.__mro__[: section.__mro__.index(Section)]):
        above: list[str] = []
        for line in inspect.getsource(part).splitlines()[1:]:
            if field := re.match(r"    (\w+): ", line):
                beside = "".join(line.rpartition("  # ")[1:]) if "  # " in line else ""
                if above or beside or field[1] not in comments:
                    comments[field[1]] = (above, beside)
                above = []
            else:
                above.append(line.strip())
    return comments


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value)
    if value == {}:
        return "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./?-]+|\$\{.*\}", value) else json.dumps(value)
    return re.sub(r"e-0", "e-", repr(value))


if __name__ == "__main__":
    for name in JOBS:
        (Path(__file__).parent / f"{name}.yaml").write_text(yaml_of(name), encoding="utf-8")
    (Path(__file__).parents[1] / "docs" / "config.md").write_text(reference(), encoding="utf-8")
