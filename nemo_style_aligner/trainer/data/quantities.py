r"""Numbers with units, in the notations of prose, Unicode and LaTeX, by their exact values.

    quantity  = [sign] [currency [sign]] number {"million" ...} ["%"] [unit]
    number    = whole part, fraction below 1 | atom ["/" atom] ["e" n | "*" "10^" n]
    atom      = ["√"] digits ["^" n]
    unit      = term {["*" | "/" | "per"] term}      term = ["square" | "cubic"] name ["^" n]

A root must have a rational value, a unit a name in the table below. A product of two numbers is a calculation that
somebody has not made, and no number. Nothing behind a number is ever ignored: what the grammar does not take whole is
no quantity.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

_LONGEST = 100  # characters of a quantity
_MOST_BITS = 10_000  # of its value's numerator and denominator

# ---- one notation for all ------------------------------------------------------------------------

_TEX = [
    (r"\\!|\\(?:left|right|displaystyle)(?![a-zA-Z])", ""),
    (r"\{,\}", ","),
    (r"\\(?:[,:;> ]|q?quad(?![a-zA-Z]))|(?<=\S)~(?=\S)", " "),
    (r"\\[dtc]?frac\s*(\d)\s*(?=[\d{])", r"\\frac{\1}"),
    (r"\\[dtc]?frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),
    (r"\\sqrt\s*(\d)|(?<![\w\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1\2}"),
    (r"\^\s*\{?\s*(?:\\circ(?![a-zA-Z])|°)\s*\}?|\\(?:degree|circ)(?![a-zA-Z])", "°"),
    (r"(?<=[\d)}])\s?\*\*\s?(?=[-\d({])", "^"),
    (r"\\(?:cdot|times)(?![a-zA-Z])|[·×⋅∙]|(?<=[\d\s])x(?=\s?10\^)", "*"),
    (r"\\pi(?![a-zA-Z])", "π"),
    (r"\\(?:pounds|textsterling)(?![a-zA-Z])", "£"),
    (r"\\euro?(?![a-zA-Z])", "€"),
    (r"\\([$%&#])", r"\1"),
    (r"\\[()\[\]]", " "),
    ("[−–‒﹣]", "-"),
]
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_RAISED = re.compile("[⁻⁰¹²³⁴-⁹]+")
_LOWERED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_WITH_BRACES = re.compile(
    r"\\[dtc]?frac\s*\{(?P<over>[^{}]*)\}\s*\{(?P<under>[^{}]*)\}"
    r"|\\sqrt\s*\{(?P<root>[^{}]*)\}"
    r"|\^\s*\{(?P<power>[^{}]*)\}"
    r"|\\(?:text(?:rm|bf|it)?|math(?:rm|bf|it|sf)|mbox|f?boxed|operatorname)\s*\{(?P<words>[^{}]*)\}"
)
_DEPTH = 4  # of braces in braces


def plain(text: str) -> str:
    """A text in which all notations of a number, LaTeX's and Unicode's, have become one, in linear time.

    Dollar signs around mathematics are left out, a single one is money.
    """
    if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0:
        text = re.sub(r"(?<!\\)\$", "", text)
    text = _VULGAR.sub(lambda found: _apart(found, unicodedata.normalize("NFKC", found[0]).replace("⁄", "/")), text)
    text = _RAISED.sub(lambda found: "^" + found[0].translate(_LOWERED), text.replace("⁄", "/"))
    for pattern, replacement in _TEX:
        text = re.sub(pattern, replacement, text)
    for _ in range(_DEPTH):
        text = _WITH_BRACES.sub(_without_braces, text)
    text = " ".join(text.split())
    for _ in range(_DEPTH):
        is_marked = len(text) > 2 and text[0] in "*`" and text[-1] == text[0]
        text = text[1:-1].strip() if is_marked else text
    return text


def _without_braces(found: re.Match[str]) -> str:
    def part(name: str) -> str:
        inner: str = found[name].strip()
        return inner if re.fullmatch(r"[-+]?[\d.,]+", inner) else f"({inner})"

    if found["over"] is not None:
        return _apart(found, f"{part('over')}/{part('under')}")
    if found["words"] is not None:
        return _apart(found, found["words"])
    return f"√{part('root')}" if found["root"] is not None else f"^{part('power')}"


def _apart(found: re.Match[str], replacement: str) -> str:
    """A replacement with spaces where it would stick to what is before and behind it."""
    text, begin, end = found.string, found.start(), found.end()
    before, behind = text[max(0, begin - 1) : begin], text[end : end + 1]
    return " " * before.isalnum() + replacement + " " * behind.isalnum()


# ---- units ---------------------------------------------------------------------------------------

_TABLE = """
m: 1 m meter metre, 1000 km kilometer kilometre, 1/100 cm centimeter centimetre, 1/1000 mm millimeter millimetre
m: 0.0254 inch inches, 0.3048 ft foot feet, 0.9144 yd yard, 1609.344 mi mile
m^2: 10000 ha hectare, 4046.8564224 acre
m^3: 1/1000 l L liter litre, 1/1000000 ml mL milliliter millilitre cc, 0.003785411784 gal gallon
m s^-1: 0.44704 mph, 5/18 kmh kph
g: 1 g gram, 1000 kg kgs kilogram kilo, 1/1000 mg milligram, 1000000 t tonne, 453.59237 lb lbs pound
g: 28.349523125 oz ounce
s: 1 s sec secs second, 1/1000 ms millisecond, 60 min mins minute, 3600 h hr hrs hour, 86400 day, 604800 week
month: 1 month, 12 yr yrs year
$: 1 $ US$ USD dollar buck, 1/100 ¢ cent
€: 1 € EUR euro
£: 1 £ GBP
¥: 1 ¥ JPY yen
₹: 1 ₹ INR Rs rupee
°: 1 ° deg degree
celsius: 1 C celsius
fahrenheit: 1 F fahrenheit
J: 1 J joule, 1000 kJ kilojoule
cal: 1 cal calorie, 1000 kcal kilocalorie
N: 1 N newton
W: 1 W watt, 1000 kW kilowatt
V: 1 V volt
A: 1 A amp ampere
Hz: 1 Hz hertz, 1000 kHz kilohertz
mol: 1 mol mole
bit: 1 bit, 8 byte
"""  # base units and their powers: factors, and the names that they belong to
_THINGS = (
    "animal apple bag ball balloon banana basket bean bee bird block board boat bolt book bottle bowl box boy bracelet "
    "brick bucket bug bus cake candle candy candies car card carrot cat chair chicken children chocolate class coin "
    "cookie cow crayon cup cupcake customer dog doll donut dress drink duck edge egg employee face fish flower "
    "friend frog game gem gift girl glass goal grape group guest hat head horse house ice item jar jellybean job key "
    "kid kids lap leaf leaves lemon letter light line lollipop man marble mark match meal member men monkey mouse mice "
    "muffin necklace neighbor note nut orange pack package packet page paper part passenger peach pear pen pencil "
    "people person phone photo piece pig pie pizza plant plate player point potato present problem puppy puppies "
    "question rabbit ribbon room rose row scarf school seat seed set sheep sheet shell shelf shirt shoe slice snack "
    "sock spider spoon stamp star step sticker store strawberry strawberries student table task teacher team thing "
    "ticket tile toy trade train tree triangle trip truck unit vase vehicle vertex vertices video visitor vote watch "
    "window woman women word worker yogurt zebra"
)
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}


@dataclasses.dataclass(frozen=True)
class Unit:
    """What a number counts.

    Attributes:
        factor: of the unit, in base units.
        dimensions: base units and their powers; none of a bare number.
        is_sure: False for a letter that sticks to its number, as in 2m: it may be a variable.
    """

    factor: Fraction = Fraction(1)
    dimensions: frozenset[tuple[str, int]] = frozenset()
    is_sure: bool = True

    def agrees(self, other: Unit) -> bool:
        """Whether numbers in these units can be equal: one may lack its unit, but two must be of a kind."""
        if self.dimensions and other.dimensions:
            return self.dimensions == other.dimensions
        return self.is_sure and other.is_sure


@functools.cache
def _names() -> Mapping[str, Unit]:
    known = {thing: Unit(dimensions=frozenset({(thing, 1)})) for thing in _THINGS.split()}
    for line in _TABLE.strip().splitlines():
        base, _, entries = line.partition(": ")
        powers = (part.partition("^") for part in base.split())
        dimensions = frozenset((name, int(power or 1)) for name, _, power in powers)
        for factor, *names in map(str.split, entries.split(",")):
            known |= dict.fromkeys(names, Unit(Fraction(factor), dimensions))
    return known


def _named(word: str) -> Unit | None:
    """The unit of this name, in the plural, too. Short names are symbols, whose case counts."""
    names = [word, *([word.casefold()] if len(word) > 3 else [])]
    names += [name.removesuffix(end) for name in names for end in ("es", "s") if len(name) - len(end) > 2]
    return next((_names()[name] for name in names if name in _names()), None)


def unit(text: str) -> Unit | None:
    """The unit behind a number, all of the text; None if that is no known unit."""
    terms: list[tuple[Unit, int]] = []
    side, ahead = 1, 1
    for token in re.findall(r"[*/°]|\^-?\d(?!\d)|[^\s*/^°]+|\^", text):
        word = token.rstrip(".")
        if word in ("/", "per"):
            side = -1
        elif word.startswith("^") or (terms and word in ("squared", "cubed")):
            power = _POWERS.get(word) or int(word[1:] or 0)
            if not terms or not power:
                return None
            terms[-1] = (terms[-1][0], terms[-1][1] * power)
        elif word in _POWERS:
            ahead = _POWERS[word]
        elif (found := _named(word)) is not None:
            terms.append((found, side * ahead))
            ahead = 1
        elif word != "*":
            return None
    return _product(terms, not re.match(r"[A-Za-z](?![A-Za-z])", text)) if terms or not text.strip() else None


def _product(terms: list[tuple[Unit, int]], is_sure: bool) -> Unit:
    powers: Counter[str] = Counter()
    for one, power in terms:
        powers.update({name: power * of_base for name, of_base in one.dimensions})
    factor = math.prod((one.factor**power for one, power in terms), start=Fraction(1))
    return Unit(factor, frozenset((name, power) for name, power in powers.items() if power), is_sure)


# ---- numbers -------------------------------------------------------------------------------------

_DIGITS = (
    r"(?:\d{1,3}(?:\.\d{3}){2,}(?:,\d+)?|\d{1,3}(?:\.\d{3})+,\d+"  # 1.234.567,8
    r"|(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d{1,3}(?:['’]\d{3})+"
    r"|\d{1,2}(?:,\d{2})+,\d{3}|\d+)(?:\.\d+)?"  # the first of these is India's 12,34,567
    r"|\.\d+)(?!\d)"
)
_ATOM = rf"√?{_DIGITS}(?:\^[-+]?\d{{1,3}}(?![\d.]))?"
_ZEROS = {"hundred": 2, "thousand": 3, "lakh": 5, "million": 6, "crore": 7, "billion": 9, "trillion": 12}
_FACTORS = {name: 10**zeros for name, zeros in _ZEROS.items()} | {"dozen": 12}
_NUMBER = (
    r"(?:(?P<currency>US ?\$|[$€£¥₹]|(?:USD|EUR|GBP|JPY|INR|Rs\.?)(?=\s))\s*(?P<inner>-?)\s*)?"
    r"(?:(?P<whole>\d+)\s(?:and\s)?(?P<part>\d{1,2}\s?/\s?\d+)(?![\d.,/^])"
    rf"|(?P<number>{_ATOM})(?:\s?/\s?(?P<divisor>{_ATOM}))?"
    r"(?:[eE](?P<e>[-+]?\d{1,3})(?!\d)|\s?\*\s?10\^(?P<ten>[-+]?\d{1,3})(?!\d))?)"
    rf"(?P<factors>(?i:\s?(?:{'|'.join(_FACTORS)})s?\b)*)(?P<percent>(?i:\s?(?:%|percent\b|per cent\b))?)"
)
_WHOLE = re.compile(rf"(?P<sign>[-+]?)\s*{_NUMBER}")
_IN_PROSE = re.compile(rf"(?:(?<![\w)\]}}.])-|(?:(?<=[=:(])|(?<=[=:(] ))- )?(?<![\w^/√])(?<!\d[:.,]){_NUMBER}")
_STUCK = re.compile(r"(?:[\w^√/(]|[:.,](?=\d))*")


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number, whose value has what belongs to it (million, %), and its unit."""

    value: Fraction
    unit: Unit

    def equals(self, other: Quantity) -> bool:
        """Whether both say the same; where one alone has a unit, it is meant in the other, too."""
        if not self.unit.agrees(other.unit):
            return False
        if self.unit.dimensions and other.unit.dimensions:
            return self.value * self.unit.factor == other.value * other.unit.factor
        return self.value == other.value


def quantity(text: str) -> Quantity | None:
    """What a text in `plain` notation says, if all of it is a quantity."""
    text = text.removesuffix(".").rstrip()
    found = _WHOLE.match(text) if len(text) <= _LONGEST else None
    if found is None or (value := _value(found)) is None:
        return None
    counted = _with_currency((found["currency"] or "").replace(" ", ""), text[found.end() :])
    is_negative = (found["sign"] == "-") != bool(found["inner"])
    return None if counted is None else Quantity(-value if is_negative else value, counted)


def _value(found: re.Match[str]) -> Fraction | None:
    value = _mixed(found) if found["whole"] else _ratio(found)
    if value is None:
        return None
    for word in found["factors"].split():
        value *= _FACTORS[word.casefold().removesuffix("s")]
    return value / 100 if found["percent"] else value


def _mixed(found: re.Match[str]) -> Fraction | None:
    over, under = map(int, found["part"].split("/"))
    return int(found["whole"]) + Fraction(over, under) if 0 < over < under else None


def _ratio(found: re.Match[str]) -> Fraction | None:
    number, divisor = _atom(found["number"]), _atom(found["divisor"] or "1")
    is_unclear = " " in found["number"] and found["divisor"]  # 1 100/200: a mixed number, or 1,100 by 200?
    if number is None or not divisor or is_unclear:
        return None
    return number / divisor * Fraction(10) ** int(found["e"] or found["ten"] or 0)


def _atom(text: str) -> Fraction | None:
    """The value of a number with its root and power, if it is rational and no giant."""
    digits, _, power = text.removeprefix("√").partition("^")
    if digits.count(".") > 1 or -1 < digits.find(".") < digits.find(","):
        digits = digits.replace(".", "").replace(",", ".")
    value, n = Fraction(re.sub(r"[ ,'’]", "", digits)), int(power or 1)
    if text.startswith("√"):
        root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
        if root * root != value:
            return None
        value = root
    bits = max(value.numerator.bit_length(), value.denominator.bit_length()) * abs(n)
    return None if bits > _MOST_BITS or (not value and n < 0) else value**n


def _with_currency(currency: str, rest: str) -> Unit | None:
    behind = unit(rest)
    if not currency or behind is None:
        return behind
    money = unit(currency)
    if money is not None and money.dimensions <= behind.dimensions:  # $5 dollars
        return behind
    return unit(f"{currency} {rest}")


# ---- in a text -----------------------------------------------------------------------------------


def last_quantity(text: str) -> str | None:
    """The last number of a text in `plain` notation, with all that belongs to it; None if it has none."""
    last: re.Match[str] | None = None
    for last in _IN_PROSE.finditer(text):  # noqa: B007
        pass
    return None if last is None else (last[0] + extension(text[last.end() :])).rstrip(".")


def extension(rest: str) -> str:
    """What belongs to a number of the text behind it: what sticks to it, or a million and a known unit."""
    if (stuck := _STUCK.match(rest)) and stuck[0]:
        return stuck[0]
    found = re.match(r"(?:\s?[^\s,;:!?()]+){0,4}", rest)
    words = "" if found is None else found[0]
    while words and quantity("1" + words) is None:
        words = words[: max(words.rfind(" "), 0)]
    return words
