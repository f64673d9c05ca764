"""The inference-protocol codec: round trips, agreement with tritonclient, refusal of everything malformed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nemo_style_aligner.guard.protocol import (
    HEADER_LENGTH_FIELD,
    ProtocolError,
    datatype_of,
    decode_error,
    decode_infer_request,
    decode_infer_response,
    encode_infer_request,
    encode_infer_response,
)

ARRAYS = {
    "BOOL": np.array([[True, False]]),
    "UINT8": np.array([0, 255], np.uint8),
    "UINT16": np.array([0, 65535], np.uint16),
    "UINT32": np.array([0, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 2**64 - 1], np.uint64),
    "INT8": np.array([-128, 127], np.int8),
    "INT16": np.array([-(2**15), 2**15 - 1], np.int16),
    "INT32": np.array([[-(2**31)], [2**31 - 1]], np.int32),
    "INT64": np.array([[[-(2**63), 2**63 - 1]]], np.int64),
    "FP16": np.array([0.5, -1.5], np.float16),
    "FP32": np.array([[1e-30, 3.25]], np.float32),
    "FP64": np.array([1e-300, 0.1], np.float64),
    "BYTES": np.array([[b"abc"], ["é".encode()], [b""]], object),
}


def request_body(*tensors, **more) -> bytes:
    return json.dumps({"inputs": list(tensors), **more}).encode()


def one(datatype="INT64", shape=(2,), data=(1, 2), **more) -> dict:
    return {"name": "x", "datatype": datatype, "shape": list(shape), "data": data, **more}


def raw(datatype: str, shape: list[int], blob: bytes, size: int | None = None) -> tuple[bytes, int]:
    size = len(blob) if size is None else size
    tensor = {"name": "x", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor]}).encode()
    return head + blob, len(head)


def same(left: np.ndarray, right: np.ndarray) -> None:
    assert left.shape == right.shape and left.dtype == right.dtype
    np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", ARRAYS)
def test_requests_and_responses_round_trip(datatype: str, binary: bool) -> None:
    array = ARRAYS[datatype]
    assert datatype_of(array) == datatype
    inputs = {"x": array, "empty": array[:0]}
    body, headers = encode_infer_request(inputs, parameters={"k": 1}, binary=binary)
    request = decode_infer_request(body, headers.get(HEADER_LENGTH_FIELD))
    assert request.parameters["k"] == 1 and request.binary_outputs is binary
    for name, sent in inputs.items():
        assert request.inputs[name].datatype == datatype
        same(request.inputs[name].array, sent)
    body, headers = encode_infer_response("m", "1", inputs, request)
    outputs = decode_infer_response(body, headers.get(HEADER_LENGTH_FIELD))
    for name, sent in inputs.items():
        same(outputs[name].array, sent)


def test_nested_and_flat_json_data_are_the_same() -> None:
    nested = decode_infer_request(request_body(one(shape=(2, 1, 2), data=[[[1, 2]], [[3, 4]]])))
    flat = decode_infer_request(request_body(one(shape=(2, 1, 2), data=[1, 2, 3, 4])))
    same(nested.inputs["x"].array, flat.inputs["x"].array)


def test_each_output_comes_in_the_form_asked_for() -> None:
    outputs = [{"name": "a", "parameters": {"binary_data": True}}, {"name": "b"}]
    request = decode_infer_request(request_body(one(), outputs=outputs))
    arrays = {name: np.ones(2, np.float32) for name in ("a", "b", "c")}
    body, headers = encode_infer_response("m", "1", arrays, request)
    head = json.loads(body[: int(headers[HEADER_LENGTH_FIELD])])
    assert [entry["name"] for entry in head["outputs"]] == ["a", "b"]
    assert "data" not in head["outputs"][0] and head["outputs"][1]["data"] == [1.0, 1.0]


def test_tritonclient_reads_and_writes_the_same_bytes() -> None:
    triton = pytest.importorskip("tritonclient.http", reason="the tritonclient package is not installed")
    for datatype in ("INT64", "FP32", "BYTES"):
        array = ARRAYS[datatype]
        tensor = triton.InferInput("x", list(array.shape), datatype)
        tensor.set_data_from_numpy(array, binary_data=True)
        body, length = triton.InferenceServerClient.generate_request_body([tensor])
        request = decode_infer_request(body, length)
        same(request.inputs["x"].array, array)
        body, headers = encode_infer_response("m", "1", {"x": array}, request)
        result = triton.InferenceServerClient.parse_response_body(body, header_length=int(headers[HEADER_LENGTH_FIELD]))
        np.testing.assert_array_equal(result.as_numpy("x"), array)


MALFORMED = {
    "not JSON": b"{",
    "NaN": b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [NaN]}]}',
    "not UTF-8": b"\xff\xfe",
    "deep": b"[" * 100000,
    "huge number": b'{"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [' + b"9" * 9999 + b"]}]}",
    "a list": b"[]",
    "no inputs": b"{}",
    "empty inputs": request_body(),
    "input not an object": request_body(3),
    "no name": request_body({"datatype": "INT64", "shape": [1], "data": [1]}),
    "twice": request_body(one(), one()),
    "unknown datatype": request_body(one("INT128")),
    "datatype not a string": request_body(one({})),
    "no shape": request_body({"name": "x", "datatype": "INT64", "data": [1]}),
    "negative shape": request_body(one(shape=(-1,))),
    "float shape": request_body(one(shape=(2.0,))),
    "bool shape": request_body(one(shape=(True,), data=[1])),
    "too many dimensions": request_body(one(shape=(1,) * 9, data=[1])),
    "huge shape": request_body(one(shape=(2**31 - 1, 2**31 - 1), data=[1])),
    "huge shape of nothing": request_body(one(shape=(0, 2**31 - 1, 2**31 - 1), data=[])),
    "size beyond limits": request_body(one(shape=(2**63,), data=[1])),
    "no data": request_body({"name": "x", "datatype": "INT64", "shape": [1]}),
    "data not a list": request_body(one(data="ab")),
    "too little data": request_body(one(shape=(3,))),
    "ragged": request_body(one(shape=(2, 2), data=[[1, 2], [3]])),
    "too deep data": request_body(one(shape=(2,), data=[[1], [2]])),
    "scalar shape, nested data": request_body(one(shape=(), data=[[1]])),
    "float for int": request_body(one(data=[1, 2.0])),
    "bool for int": request_body(one(data=[1, True])),
    "int for bool": request_body(one("BOOL", data=[0, 1])),
    "string for float": request_body(one("FP32", data=[1, "2"])),
    "null": request_body(one("FP32", data=[1, None])),
    "int32 overflow": request_body(one("INT32", data=[1, 2**31])),
    "int64 overflow": request_body(one("INT64", data=[1, 2**63])),
    "uint8 negative": request_body(one("UINT8", data=[1, -1])),
    "fp32 overflow": request_body(one("FP32", data=[1, 1e39])),
    "fp64 overflow": request_body(one("FP64", data=[1, 10**400])),
    "number for bytes": request_body(one("BYTES", data=["a", 1])),
    "lone surrogate": request_body(one("BYTES", data=["a", "\ud800"])),
    "id not a string": request_body(one(), id=3),
    "parameters not an object": request_body(one(), parameters=[]),
    "flag not a bool": request_body(one(), parameters={"binary_data_output": 1}),
    "outputs not a list": request_body(one(), outputs={}),
    "output without a name": request_body(one(), outputs=[{}]),
    "output twice": request_body(one(), outputs=[{"name": "a"}, {"name": "a"}]),
    "classification": request_body(one(), outputs=[{"name": "a", "parameters": {"classification": 3}}]),
    "shared memory": request_body(one(parameters={"shared_memory_region": "r"})),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused(name: str) -> None:
    with pytest.raises(ProtocolError) as error:
        decode_infer_request(MALFORMED[name])
    assert error.value.status == 400
    assert decode_error(error.value.body()) == error.value.message


@pytest.mark.parametrize(
    ("body", "length"),
    [
        raw("INT64", [1], b"1234567"),  # too few bytes
        raw("INT64", [1], b"123456789"),  # too many
        raw("INT64", [1], b"12345678", size=4),  # bytes left over
        raw("INT64", [1], b"1234", size=8),  # lies about its length
        raw("INT64", [1], b"12345678", size=-8),
        raw("INT64", [1], b"12345678", size=True),
        raw("INT64", [2**20, 2**20], b"12345678"),
        raw("BYTES", [1], b"\x05\x00\x00\x00ab"),  # element longer than the data
        raw("BYTES", [1], b"\x05\x00"),  # cut in the length
        raw("BYTES", [1], b"\x00\x00\x00\x00\x00\x00\x00\x00"),  # one element too many
        raw("BYTES", [3], b"\x00\x00\x00\x00"),  # too few
        (raw("INT64", [1], b"12345678")[0], 10**6),
        (raw("INT64", [1], b"12345678")[0], "-5"),
        (raw("INT64", [1], b"12345678")[0], "١"),
        (raw("INT64", [1], b"12345678")[0], "9" * 5000),
        (raw("INT64", [1], b"12345678")[0], None),
    ],
)
def test_lying_lengths_are_refused(body: bytes, length: int | str | None) -> None:
    with pytest.raises(ProtocolError) as error:
        decode_infer_request(body, length)
    assert error.value.status == 400


def test_values_that_json_cannot_hold_are_an_error_not_bad_json() -> None:
    request = decode_infer_request(request_body(one()))
    with pytest.raises(ProtocolError, match="binary"):
        encode_infer_response("m", "1", {"x": np.array([np.nan], np.float32)}, request)


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(TypeError, match="complex64"):
        encode_infer_request({"x": np.ones(1, np.complex64)})
