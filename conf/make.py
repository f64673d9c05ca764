"""Write this folder's YAML files from `nemo_style_aligner.config.schema`: ``python conf/make.py``."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_style_aligner.config.fields import Field, Section, hints_of, section_of
from nemo_style_aligner.config.schema import JOBS, fields_of_job
from nemo_style_aligner.config.section_names import names_of

HEAD = """# {title}
#
# Keys and defaults are NeMo-Aligner's, apart from keys of this project's own and the defaults that
# docs/from_nemo_aligner.md lists. Sizes are counted over all ranks unless said otherwise; "per rank" means per
# data-parallel rank. Made from nemo_style_aligner/config/schema.py by conf/make.py.

"""


def yaml_of(job: str) -> str:
    """The YAML file of a job."""
    lines = "\n".join(_lines(JOBS[job].sections, fields_of_job(job)))
    text = re.sub(r"\n\n+", "\n\n", lines.strip())
    for name, own in names_of(job).own.items():
        indent = "  " * name.count(".")
        text = re.sub(rf"^{indent}{name.split('.')[-1]}:", f"{indent}{own.split('.')[-1]}:", text, flags=re.MULTILINE)
    return HEAD.format(title=JOBS[job].title) + names_of(job).translated(text) + "\n"


def _lines(section: type[Section], fields: Mapping[str, Field], prefix: str = "", indent: str = "") -> Iterator[str]:
    comments = _comments(section)
    for name, hint in hints_of(section).items():
        if (field := fields.get(f"{prefix}{name}")) is None:  # this job has no such key
            continue
        above, beside = comments[name]
        yield from (f"{indent}{line}".rstrip() for line in ([""] if not prefix else []) + above)
        nested = section_of(hint)
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
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./?-]+|\$\{.*\}", value) else json.dumps(value)
    return re.sub(r"e-0", "e-", repr(value))


if __name__ == "__main__":
    for name in JOBS:
        (Path(__file__).parent / f"{name}.yaml").write_text(yaml_of(name), encoding="utf-8")
