"""Of what the schema's annotations are made: ranges, choices, marks; and the check of a config against them.

A field of a section (`schema`) is annotated with a Python type: ``int``, ``float | None``, ``list[float]``, a
`Literal` for choices, another section. Around it, `Annotated` adds a `Range`, `Free` that the value may change when a
run is resumed, and `Given` that the user has to give it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

T = TypeVar("T")

_FREE, _GIVEN, _OPEN, _FILLED = "free", "given", "open", "filled"

Free = Annotated[T, _FREE]
"""A run computes the same whatever the value, rounding and sampled numbers aside: starts of a run may differ in it."""

Given = Annotated[T, _GIVEN]
"""The user has to give a value, though the YAML files may have null for it, as NeMo-Aligner's do."""

Filled = Annotated[T, _FILLED]
"""With null, the value in the checkpoint's own config; jobs that need one are refused where that has none, too."""

Open = Annotated[T, _OPEN]
"""A section in which the user chooses the keys."""


class Section:
    """A section of a config: its annotated attributes are keys with their defaults, the comments beside them docs.

    An instance has the values of one config, as plain Python values of the annotated types; it never changes.
    """

    def __eq__(self, other: object) -> bool:
        """Whether both are the same section with the same values."""
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # values may be lists

    def __init__(self, **given: Any) -> None:
        """Read plain values; a key that is not given has its default."""
        fields = self._fields()
        if unknown := given.keys() - fields.keys():
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        for name, (field, nested) in fields.items():
            is_computed = isinstance(field.default, str) and "${" in field.default  # of other keys, which `read` knows
            default = {} if nested is not None and field.is_section else None if is_computed else field.default
            vars(self)[name] = field.read(given.get(name, default), nested)

    @classmethod
    def among(cls, content: Mapping[str, Any], *, is_open: bool = False) -> Self:
        """The section's keys among others, which are attributes as well where users choose them (`Open`)."""
        section = cls(**{name: value for name, value in content.items() if name in cls._fields()})
        vars(section).update({name: value for name, value in content.items() if is_open and name not in vars(section)})
        return section

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name}: a config does not change; see `replaced`")

    @classmethod
    @functools.cache
    def _fields(cls) -> Mapping[str, tuple[Field, type[Section] | None]]:
        """The fields of its own keys, and the sections that they are."""
        return {name: _field(hint, getattr(cls, name, None)) for name, hint in hints_of(cls).items()}

    def replaced(self, **changes: Any) -> Self:
        """The same with other values."""
        return type(self)(**(vars(self) | changes))


def of(default: Any) -> Any:
    """A default of another type than the key's: ``${...}``, which is computed, or ``???``, of a key without one."""
    return default


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, the ends included unless said otherwise; ``also`` is allowed too: off.

    With ``is_share``, numbers up to 1 may be fractions, and larger ones count something, so they must be whole.
    """

    low: float
    high: float = math.inf
    low_excluded: bool = False
    high_excluded: bool = False
    also: float | None = None
    is_share: bool = False

    def allows(self, value: Any) -> bool:
        """Whether a number, or each number of a list, is in the range. Other types pass."""
        if isinstance(value, list | tuple):
            return all(map(self.allows, value))
        if isinstance(value, bool) or not isinstance(value, int | float) or value == self.also:
            return True
        above = value > self.low if self.low_excluded else value >= self.low
        below = value < self.high if self.high_excluded else value <= self.high
        whole = not self.is_share or value <= 1 or float(value).is_integer()
        return above and below and not math.isinf(value) and whole

    def __str__(self) -> str:
        if self.also is not None:
            return f"{self.also}, or {dataclasses.replace(self, also=None)}"
        if self.is_share:
            return f"a share from {self.low} to 1.0, or a whole number"
        if self.low == -math.inf:
            return "a finite number"
        if self.high == math.inf:
            return f"above {self.low}" if self.low_excluded else f"{self.low} or more"
        left, right = "(" if self.low_excluded else "[", ")" if self.high_excluded else "]"
        return f"in {left}{self.low}, {self.high}{right}"


_NAMES: dict[type, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a section",
}
_LARGEST = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Field:
    """What the schema says about a key.

    Attributes:
        kinds: the value's type is one of these.
        element: a list's elements are of this type, and of numbers there are some; None: they are anything.
        is_nullable: null is a value.
        choices: the only values, if there are any.
        range: of numbers.
        marks: see `Free`, `Given` and `Open`.
        default: None for a section, too.
    """

    kinds: tuple[type, ...]
    element: type | None = None
    is_nullable: bool = False
    choices: tuple[Any, ...] = ()
    range: Range | None = None
    marks: frozenset[str] = frozenset()
    default: Any = None

    @property
    def is_section(self) -> bool:
        """Whether nothing but a section is a value; a key that may also be a text, say, has a default of its own."""
        return self.kinds == (dict,)

    @property
    def may_change(self) -> bool:
        """Whether starts of the same run may differ in it."""
        return _FREE in self.marks

    @property
    def must_be_given(self) -> bool:
        """Whether the user has to give it."""
        return _GIVEN in self.marks

    @property
    def is_open(self) -> bool:
        """Whether the user chooses the keys below it."""
        return _OPEN in self.marks

    def typed(self, value: Any) -> Any:
        """``1e3`` as a whole number where one is wanted, a number as text where text is; other values as they are."""
        if isinstance(value, float) and int in self.kinds and float not in self.kinds and value.is_integer():
            return int(value) if abs(value) <= _LARGEST else value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return str(value) if self.kinds == (str,) and is_number else value

    def read(self, value: Any, nested: type[Section] | None) -> Any:
        """A value as its annotation says: a section, floats where no whole number may be."""
        value = self.typed(value)
        if nested is not None and isinstance(value, Mapping):
            return nested.among(value, is_open=self.is_open)
        if isinstance(value, list) and self.element is not None:
            return [_as(self.element, one) for one in value]
        return _as(float, value) if float in self.kinds and int not in self.kinds else value

    def problem(self, key: str, value: Any) -> str | None:
        """What is wrong with a value other than null; None if nothing is."""
        if int in self.kinds and isinstance(value, int | float) and abs(value) > _LARGEST:
            return f"{key}={value}: too large; numbers here are below 2^63"
        element = self.element if self.element in (int, float) else None
        if isinstance(value, list) and element and not (value and all(_fits(one, element) for one in value)):
            return f"{key}={value}: must be a list of {'numbers' if element is float else 'whole numbers'}"
        if self.kinds and not any(_fits(value, kind) for kind in self.kinds):
            names = " or ".join(_NAMES[kind] for kind in self.kinds)
            return f"{key}={value!r}: must be {names}, this is {_NAMES.get(type(value), type(value).__name__)}"
        if self.range is not None and not self.range.allows(value):
            return f"{key}={value}: must be {self.range}"
        if self.choices and value not in self.choices:
            return f"{key}={value}: choose {', '.join(map(str, self.choices[:-1]))} or {self.choices[-1]}"
        return None


def hints_of(section: type[Section]) -> dict[str, Any]:
    """A section's keys and their annotations, in their order."""
    return get_type_hints(section, include_extras=True)


def fields_of(section: type[Section]) -> Mapping[str, Field]:
    """The fields of a section, by dotted key, and those of the sections in it, in their order."""
    fields: dict[str, Field] = {}
    for name, (fields[name], nested) in section._fields().items():
        for key, field in fields_of(nested).items() if nested is not None else ():
            marks = field.marks | (fields[name].marks & {_FREE})
            fields[f"{name}.{key}"] = dataclasses.replace(field, marks=marks)
    return fields


def section_of(hint: Any) -> type[Section] | None:
    """The section that an annotation names, if it names one."""
    return _field(hint, None)[1]


def _field(hint: Any, default: Any) -> tuple[Field, type[Section] | None]:
    """A key's field, and the section that it is."""
    if get_origin(hint) is Annotated:
        kind, *extras = get_args(hint)
        field, nested = _field(kind, default)
        limits = [extra for extra in extras if isinstance(extra, Range)]
        marks = field.marks.union(extra for extra in extras if isinstance(extra, str))
        nullable = field.is_nullable or _FILLED in marks
        limit = limits[0] if limits else field.range
        return dataclasses.replace(field, range=limit, marks=marks, is_nullable=nullable), nested
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_field(part, default) for part in get_args(hint) if part is not type(None)]
        return Field(
            tuple(dict.fromkeys(kind for part, _ in parts for kind in part.kinds)),
            element=next((part.element for part, _ in parts if part.element is not None), None),
            is_nullable=type(None) in get_args(hint),
            choices=tuple(choice for part, _ in parts for choice in part.choices),
            range=next((part.range for part, _ in parts if part.range is not None), None),
            marks=frozenset().union(*(part.marks for part, _ in parts)),
            default=default,
        ), next((nested for _, nested in parts if nested is not None), None)
    if get_origin(hint) is Literal:
        return Field(tuple(dict.fromkeys(map(type, get_args(hint)))), choices=get_args(hint), default=default), None
    if (kind := get_origin(hint)) in (list, dict):
        element = get_args(hint)[-1]
        is_known = element in (int, float) or (isinstance(element, type) and issubclass(element, Section))
        return Field((kind,), element=element if is_known else None, default=default), None
    if isinstance(hint, type) and issubclass(hint, Section):
        return Field((dict,)), hint
    return Field((hint,), default=default), None


def find_field(fields: Mapping[str, Field], key: str) -> Field | None:
    """A key's field; None if there is no such key."""
    above = key
    while above := above.rpartition(".")[0]:
        if (section := fields.get(above)) is not None and section.is_open:
            return Field((), is_nullable=True, marks=section.marks & {_FREE})
    return fields.get(key)


def value_problems(cfg: DictConfig, fields: Mapping[str, Field], defaults: DictConfig) -> Iterator[str]:
    """One line for each value that its field does not allow, or that cannot be computed.

    A whole number is accepted as a float. A float that is a whole number (``1e3``), given for a whole number, becomes
    one in ``cfg``; a number that is given for text becomes text.
    """
    for key, value in list(values(cfg)):
        field = find_field(fields, key)
        if isinstance(value, OmegaConfBaseException):
            if not isinstance(value, InterpolationToMissingValueError):  # else the value it refers to is reported
                line = str(value).splitlines()[0]
                yield f"{key}: cannot be computed from the values it refers to: {line}"
        elif field is None:
            continue
        elif value is None:
            if not field.is_nullable and not field.must_be_given:
                yield f"{key}=null: this key needs a value; its default is {_shown_default(key, defaults)}"
        elif problem := field.problem(key, typed := field.typed(value)):
            section, _, name = key.rpartition(".")
            if isinstance(value, str) and OmegaConf.is_interpolation(OmegaConf.select(cfg, section), name):
                problem += "; of a variable of the environment write $NAME, in a file ${oc.decode:${oc.env:NAME}}"
            yield problem
        elif type(typed) is not type(value):
            OmegaConf.update(cfg, key, typed)


def _shown_default(key: str, defaults: DictConfig) -> Any:
    try:
        return OmegaConf.select(defaults, key, throw_on_missing=False)
    except OmegaConfBaseException:  # it refers to a key without a value
        return None


def _as(kind: type, value: Any) -> Any:
    if issubclass(kind, Section):
        return kind.among(value) if isinstance(value, Mapping) else value
    return float(value) if kind is float and type(value) is int else value


def _fits(value: Any, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float)
    if kind is str:
        return isinstance(value, str | int | float)
    return isinstance(value, kind)


def values(cfg: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not missing, with its dotted key; lists and empty sections are values, other sections not.

    In place of a value that cannot be resolved stands the `OmegaConfBaseException` that says why.
    """
    for name in map(str, cfg):
        if OmegaConf.is_missing(cfg, name):
            continue
        key = f"{prefix}{name}"
        try:
            value = cfg[name]
            if isinstance(value, ListConfig) or (isinstance(value, DictConfig) and not len(value)):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            yield key, error
            continue
        if isinstance(value, DictConfig):
            yield from values(value, f"{key}.")
        else:
            yield key, value
