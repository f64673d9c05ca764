"""Malformed and merely odd inference requests, the same for the same seed: (kind, body, HTTP header fields)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Case = tuple[str, bytes, dict[str, str]]
LENGTH_FIELD = "Inference-Header-Content-Length"

INTEGERS = [0, 1, -1, 2, 3, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**30, 10**400]
ODD: list[Any] = [
    *INTEGERS, None, True, False, "", "x", "NaN", 0.5, -0.0, 1e308, [], {}, [[]], [[[]]], {"a": 1}, "\ud800", "\x00",
]  # fmt: skip
SHAPES = [
    [], [0], [1], [2], [1, 2], [2, 1], [0, 0], [1, 0], [0, 2**31 - 1], [2**31 - 1], [2**31 - 1, 2**31 - 1], [2**62, 4],
    [2**31 - 1] * 8, [65536] * 4, [1] * 9, [1] * 4000, [-1], [-1, -1], [1.0], [True], ["1"], [None], [[1]], None, 3, "",
]  # fmt: skip
DATATYPES = ["INT64", "INT32", "FP32", "FP64", "FP16", "BF16", "BOOL", "BYTES", "UINT8", "UINT64", "int64", "", None, 7]
NAMES = ["tokens", "sequence_lengths", "sentences", "values", "", "x" * 5000, None, 3, "é", "__class__"]
WORDS = [
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"NaN", b"Infinity", b"-Infinity", b"-1", b"1e999", b"null", b"true",
    b"\x00", b"\xff", b"\\u0000", b"\\ud800", b"9" * 400, b"[" * 3000, b'{"a":' * 3000, b'"inputs":[],',
]  # fmt: skip


def fuzzed_requests(seed: int, count: int) -> Iterator[Case]:
    """``count`` requests: half of them good ones that were damaged, half made from the protocol's words."""
    generator = random.Random(seed)
    makers = [_mutated, _mutated, _mutated, _generated, _generated, _lying, _lying, _structure, _good]
    makers.append(_odd_parameter)
    for number in range(count):
        yield makers[number % len(makers)](generator)


def good_request(generator: random.Random) -> tuple[bytes, dict[str, str]]:
    """A request that a service with a vocabulary of 1000 and sequences of up to 64 tokens answers."""
    rows, width = generator.randint(1, 3), generator.randint(1, 6)
    tokens = [generator.randrange(1000) for _ in range(rows * width)]
    lengths = [generator.randint(1, width) for _ in range(rows)]
    inputs: list[dict[str, Any]] = [
        {"name": "tokens", "datatype": "INT64", "shape": [rows, width]},
        {"name": "sequence_lengths", "datatype": "INT64", "shape": [rows, 1]},
    ]
    head: dict[str, Any] = {"inputs": inputs, "id": str(generator.random())}
    if generator.random() < 0.5:
        head["parameters"] = {"binary_data_output": generator.random() < 0.5}
    if generator.random() < 0.5:
        inputs[0]["data"], inputs[1]["data"] = tokens, lengths
        return json.dumps(head).encode(), {}
    blobs = [b"".join(item.to_bytes(8, "little", signed=True) for item in items) for items in (tokens, lengths)]
    for entry, blob in zip(inputs, blobs, strict=True):
        entry["parameters"] = {"binary_data_size": len(blob)}
    text = json.dumps(head).encode()
    return text + b"".join(blobs), {LENGTH_FIELD: str(len(text))}


def _good(generator: random.Random) -> Case:
    return "good", *good_request(generator)


def _mutated(generator: random.Random) -> Case:
    body, headers = good_request(generator)
    data = bytearray(body)
    for _ in range(generator.randint(1, 5)):
        at = generator.randrange(len(data) + 1)
        action = generator.randrange(5)
        if action == 0 and at < len(data):
            data[at] = generator.randrange(256)
        elif action == 1:
            del data[at : at + generator.randint(1, 16)]
        elif action == 2:
            data[at:at] = generator.choice(WORDS)
        elif action == 3:
            data[at:at] = data[at : at + 24]
        else:
            del data[at:]
    return "mutated", bytes(data), headers


def _generated(generator: random.Random) -> Case:
    def tensor() -> Any:
        if generator.random() < 0.05:
            return generator.choice(ODD)
        entry: dict[str, Any] = {
            "name": generator.choice(NAMES),
            "datatype": generator.choice(DATATYPES),
            "shape": generator.choice(SHAPES),
            "data": generator.choice([ODD, [1], [1, 2], [[1, 2]], [[1], [2]], [generator.choice(ODD)], "ab", None]),
            "parameters": generator.choice(
                [{}, {"binary_data_size": generator.choice(ODD)}, {"shared_memory_region": "r"}, generator.choice(ODD)]
            ),
        }
        for name in list(entry):
            if generator.random() < 0.15:
                del entry[name]
        return entry

    head: dict[str, Any] = {"inputs": [tensor() for _ in range(generator.randint(0, 3))]}
    for name in ("id", "outputs", "parameters", "inputs"):
        if generator.random() < 0.15:
            head[name] = generator.choice(ODD)
    if generator.random() < 0.2:
        head["outputs"] = [generator.choice([{"name": generator.choice(NAMES)}, *ODD])]
    if generator.random() < 0.2:
        head["parameters"] = {
            generator.choice(["timeout", "binary_data_output", "run_id", "sequence_number"]): generator.choice(ODD)
        }
    return "generated", json.dumps(head).encode(), {}


def _odd_parameter(generator: random.Random) -> Case:
    """Good but for one parameter, which is looked at when everything else has been found to be right."""
    body, headers = good_request(generator)
    start = int(headers.get(LENGTH_FIELD, len(body)))
    head = json.loads(body[:start])
    name = generator.choice(["timeout", "timeout", "binary_data_output", "run_id", "sequence_number"])
    # A timeout of as many microseconds would be answered with 504, and rightly.
    value = generator.choice([item for item in ODD if item not in (1, 2, 3)])
    head["parameters"] = {**head.get("parameters", {}), name: value}
    text = json.dumps(head).encode()
    return "parameter", text + body[start:], {LENGTH_FIELD: str(len(text))} if headers else {}


def _lying(generator: random.Random) -> Case:
    """Lengths that are not what they say: of the JSON part, of a tensor, of a string in a tensor."""
    body, headers = good_request(generator)
    kind = generator.randrange(3)
    if kind == 0 or not headers:
        lies = ["0", "1", str(len(body)), str(len(body) + 1), str(2**63), "9" * 300, "-1", "1.5", "x", " 7", "١", ""]
        return "lying", body, {LENGTH_FIELD: generator.choice(lies).encode().decode("latin-1")}
    if kind == 1:
        start = int(headers[LENGTH_FIELD])
        head = json.loads(body[:start])
        head["inputs"][0]["parameters"]["binary_data_size"] = generator.choice(INTEGERS)
        text = json.dumps(head).encode()
        return "lying", text + body[start:], {LENGTH_FIELD: str(len(text))}
    blob = b"".join(
        generator.choice([0, 1, 5, 2**31, 2**32 - 1]).to_bytes(4, "little") + b"abc"[: generator.randint(0, 3)]
        for _ in range(generator.randint(0, 3))
    )
    entry = {"name": "sentences", "datatype": "BYTES", "shape": generator.choice(SHAPES)}
    text = json.dumps({"inputs": [{**entry, "parameters": {"binary_data_size": len(blob)}}]}).encode()
    return "lying", text + blob, {LENGTH_FIELD: str(len(text))}


_TENSOR = b'{"name":"tokens","datatype":"INT64","shape":[1,1],"data":'
STRUCTURES: list[Callable[[int], bytes]] = [
    lambda depth: b"[" * depth,
    lambda depth: b'{"inputs":' * depth,
    lambda depth: b'{"inputs":[' + _TENSOR + b"[" * depth + b"]" * depth + b"}]}",
    lambda depth: b'{"inputs":[' + _TENSOR + b"[" + b"9" * depth + b"]}]}",
    lambda depth: b'{"inputs":[],"inputs":[' + _TENSOR + b'[1],"data":[2]}]}',
    lambda depth: b'{"inputs":[' + _TENSOR + b"[NaN]}]}",
    lambda depth: b'{"inputs":[' + _TENSOR + b"[Infinity]}]}",
    lambda depth: b'{"inputs":[' + b",".join([_TENSOR + b"[1]}"] * min(depth, 1000)) + b"]}",
    lambda depth: json.dumps({"inputs": [{"name": "tokens"}] * 50, "id": "x" * depth}).encode(),
    lambda depth: b"",
    lambda depth: b"null",
    lambda depth: b"\xef\xbb\xbf{}",
    lambda depth: json.dumps({"inputs": []}).encode("utf-16"),
]


def _structure(generator: random.Random) -> Case:
    """Bodies that are wrong as a whole."""
    depth = 100000 if generator.random() < 0.02 else generator.choice([2, 10, 500, 5000])
    if generator.random() < 0.1:
        return "structure", generator.randbytes(generator.randint(0, 300)), {}
    return "structure", generator.choice(STRUCTURES)(depth), {}
