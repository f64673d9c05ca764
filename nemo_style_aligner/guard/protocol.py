"""Codec of the Open Inference Protocol v2 over HTTP (KServe v2, as Triton speaks it).

Requests and responses are JSON, or JSON followed by raw tensor bytes (the *binary tensor data*
extension): the header ``Inference-Header-Content-Length`` then gives the length of the JSON part and
each tensor's parameter ``binary_data_size`` the length of its bytes. Both directions are here, so that
service and client share one codec. Everything that arrives is checked; what is wrong raises
`ProtocolError`, which carries the HTTP status and the protocol's error body.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

JSON_TYPE = "application/json"
LIVE_PATH, READY_PATH = "/v2/health/live", "/v2/health/ready"
HEADER_LENGTH_FIELD = "Inference-Header-Content-Length"
MAX_DIMENSIONS = 8
MAX_DIMENSION_SIZE = 2**31 - 1
MAX_ELEMENTS = 2**40

# Wire datatype -> numpy dtype (little endian, as the protocol says). BYTES arrays are object arrays of `bytes`.
NUMPY_DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype("O"),
}
_DATATYPE_OF_KIND: dict[str, str] = {
    dtype.newbyteorder("=").str: name for name, dtype in NUMPY_DTYPES.items() if name != "BYTES"
}


class ProtocolError(Exception):
    """A request (or response) the protocol refuses. ``status`` is the HTTP status to answer with.

    ``headers`` go with the answer, e.g. ``Retry-After``.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The protocol's error object as JSON bytes."""
        return json.dumps({"error": self.message}).encode()


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One named tensor of a request or response. ``array`` has the tensor's shape."""

    name: str
    datatype: str
    array: np.ndarray


@dataclasses.dataclass(frozen=True)
class InferRequest:
    """A decoded inference request.

    ``outputs``: those that the caller has chosen, and whether their data are to come as raw bytes; None if it did not.
    """

    inputs: dict[str, Tensor]
    id: str = ""
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: dict[str, bool] | None = None
    binary_outputs: bool = False  # whether outputs come as raw bytes if the caller did not choose any


def datatype_of(array: np.ndarray) -> str:
    """The wire datatype of a numpy array. Raises TypeError for dtypes the protocol has no name for."""
    if array.dtype == object:
        return "BYTES"
    name = _DATATYPE_OF_KIND.get(array.dtype.newbyteorder("=").str)
    if name is None:
        raise TypeError(f"numpy dtype {array.dtype} has no datatype in the inference protocol")
    return name


# ------------------------------------------------------------------ requests


def encode_infer_request(
    inputs: Mapping[str, np.ndarray],
    *,
    parameters: Mapping[str, Any] | None = None,
    binary: bool = True,
) -> tuple[bytes, dict[str, str]]:
    """Build the body and the HTTP headers of an infer request. ``binary``: inputs and outputs as raw bytes."""
    head: dict[str, Any] = {"inputs": [], "parameters": {**(parameters or {}), "binary_data_output": binary}}
    tensors = [Tensor(name, datatype_of(array), array) for name, array in inputs.items()]
    return _encode(head, "inputs", tensors, [binary] * len(tensors))


def decode_infer_request(body: bytes, header_length: str | int | None = None) -> InferRequest:
    """Decode and check an infer request. Raises `ProtocolError` (400) for anything malformed."""
    head, blob = _split(body, header_length)
    request_id = head.get("id", "")
    _require(isinstance(request_id, str), "'id' must be a string")
    parameters = _parameters(head, "request")
    binary_outputs = _flag(parameters, "binary_data_output", False)
    inputs = _decode_tensors(head, "inputs", blob)
    _require(bool(inputs), "'inputs' must name at least one tensor")
    return InferRequest(inputs, request_id, parameters, _requested_outputs(head, binary_outputs), binary_outputs)


def _requested_outputs(head: Mapping[str, Any], default_binary: bool) -> dict[str, bool] | None:
    entries = head.get("outputs")
    if entries is None:
        return None
    _require(isinstance(entries, list), "'outputs' must be a list")
    chosen: dict[str, bool] = {}
    for entry in entries:
        _require(isinstance(entry, dict), "each of 'outputs' must be an object")
        name = entry.get("name")
        _require(isinstance(name, str) and bool(name), "each of 'outputs' needs a 'name'")
        _require(name not in chosen, f"output '{name}' is asked for twice")
        parameters = _parameters(entry, f"output '{name}'")
        for unsupported in ("classification", "shared_memory_region"):
            _require(unsupported not in parameters, f"output '{name}': '{unsupported}' is not supported")
        chosen[name] = _flag(parameters, "binary_data", default_binary)
    return chosen or None


# ------------------------------------------------------------------ responses


def encode_infer_response(
    model_name: str,
    model_version: str,
    outputs: Mapping[str, np.ndarray],
    request: InferRequest,
) -> tuple[bytes, dict[str, str]]:
    """Build the body and the HTTP headers that answer ``request`` with ``outputs``.

    Only the outputs the caller chose are sent (all of them when it chose none).
    """
    wanted = request.outputs or dict.fromkeys(outputs, request.binary_outputs)
    head: dict[str, Any] = {"model_name": model_name, "model_version": model_version, "outputs": []}
    if request.id:
        head["id"] = request.id
    tensors = [Tensor(name, datatype_of(outputs[name]), outputs[name]) for name in wanted]
    return _encode(head, "outputs", tensors, list(wanted.values()))


def decode_infer_response(body: bytes, header_length: str | int | None = None) -> dict[str, Tensor]:
    """Decode and check the outputs in the answer to an infer request. Raises `ProtocolError` when it is malformed."""
    head, blob = _split(body, header_length)
    return _decode_tensors(head, "outputs", blob)


def decode_error(body: bytes) -> str:
    """The message in an error body, or the body's beginning when it is not the protocol's."""
    try:
        message = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:200].decode("utf-8", "replace")
    return str(message)


# ------------------------------------------------------------------ both directions


def _encode(
    head: dict[str, Any], field: str, tensors: Sequence[Tensor], binary: Sequence[bool]
) -> tuple[bytes, dict[str, str]]:
    blobs: list[bytes] = []
    for tensor, raw in zip(tensors, binary, strict=True):
        entry: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": [int(size) for size in tensor.array.shape],
        }
        if raw:
            blob = _to_bytes(tensor)
            entry["parameters"] = {"binary_data_size": len(blob)}
            blobs.append(blob)
        else:
            entry["data"] = _to_json(tensor)
        head[field].append(entry)
    try:
        text = json.dumps(head, allow_nan=False).encode()
    except ValueError as error:
        raise ProtocolError(500, "NaN or infinity cannot be written as JSON: ask for binary data") from error
    if not any(binary):
        return text, {"Content-Type": JSON_TYPE}
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH_FIELD: str(len(text))}
    return b"".join([text, *blobs]), headers


def _split(body: bytes, header_length: str | int | None) -> tuple[dict[str, Any], memoryview]:
    """Cut a body into its JSON object and the raw bytes behind it."""
    view = memoryview(body)
    end = len(view)
    if header_length is not None:
        text = str(header_length)
        _require(text.isascii() and text.isdigit() and len(text) < 16, f"{HEADER_LENGTH_FIELD} must be a whole number")
        end = int(text)
        _require(end <= len(view), f"{HEADER_LENGTH_FIELD} is {end}, but the body has only {len(view)} bytes")
    try:
        head = json.loads(bytes(view[:end]), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(400, f"the JSON part cannot be read: {error}") from error
    _require(isinstance(head, dict), "the JSON part must be an object")
    return head, view[end:]


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _decode_tensors(head: Mapping[str, Any], field: str, blob: memoryview) -> dict[str, Tensor]:
    entries = head.get(field)
    if not isinstance(entries, list):
        raise ProtocolError(400, f"'{field}' must be a list of tensors")
    tensors: dict[str, Tensor] = {}
    offset = 0
    for entry in entries:
        _require(isinstance(entry, dict), f"each of '{field}' must be an object")
        name = entry.get("name")
        _require(isinstance(name, str) and bool(name), f"each of '{field}' needs a 'name'")
        _require(name not in tensors, f"tensor '{name}' is given twice")
        datatype = entry.get("datatype")
        _require(
            isinstance(datatype, str) and datatype in NUMPY_DTYPES,
            f"tensor '{name}': unknown datatype {str(datatype)[:40]!r}",
        )
        shape = _shape(name, entry.get("shape"))
        parameters = _parameters(entry, f"tensor '{name}'")
        _require("shared_memory_region" not in parameters, f"tensor '{name}': shared memory is not supported")
        size = parameters.get("binary_data_size")
        if size is None:
            _require("data" in entry, f"tensor '{name}' has neither 'data' nor 'binary_data_size'")
            array = _from_json(name, datatype, shape, entry["data"])
        else:
            _require("data" not in entry, f"tensor '{name}' has both 'data' and 'binary_data_size'")
            _require(is_int(size) and size >= 0, f"tensor '{name}': binary_data_size must be a whole number")
            _require(
                size <= len(blob) - offset,
                f"tensor '{name}': binary_data_size is {size}, but {len(blob) - offset} bytes are left",
            )
            array = _from_bytes(name, datatype, shape, blob[offset : offset + size])
            offset += size
        tensors[name] = Tensor(name, datatype, array)
    _require(offset == len(blob), f"{len(blob) - offset} bytes follow the last binary tensor")
    return tensors


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    _require(
        isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS,
        f"tensor '{name}': 'shape' must be a list of at most {MAX_DIMENSIONS} sizes",
    )
    for size in shape:
        _require(
            is_int(size) and 0 <= size <= MAX_DIMENSION_SIZE,
            f"tensor '{name}': each size in 'shape' must be a whole number up to {MAX_DIMENSION_SIZE}",
        )
    elements = math.prod(size for size in shape if size)  # zeros left out, as in numpy's own check
    _require(elements <= MAX_ELEMENTS, f"tensor '{name}': 'shape' has too many elements")
    return tuple(shape)


def _to_bytes(tensor: Tensor) -> bytes:
    if tensor.datatype == "BYTES":
        items = [item if isinstance(item, bytes) else str(item).encode() for item in tensor.array.ravel()]
        return b"".join(len(item).to_bytes(4, "little") + item for item in items)
    return np.ascontiguousarray(tensor.array, dtype=NUMPY_DTYPES[tensor.datatype]).tobytes()


def _from_bytes(name: str, datatype: str, shape: tuple[int, ...], blob: memoryview) -> np.ndarray:
    count = math.prod(shape)
    if datatype == "BYTES":
        return _object_array(_split_strings(name, count, blob), shape)
    item_size = NUMPY_DTYPES[datatype].itemsize
    _require(
        count * item_size == len(blob),
        f"tensor '{name}': shape {list(shape)} of {datatype} needs {count * item_size} bytes, got {len(blob)}",
    )
    array = np.frombuffer(blob, "u1") != 0 if datatype == "BOOL" else np.frombuffer(blob, NUMPY_DTYPES[datatype])
    return array.reshape(shape)


def _split_strings(name: str, count: int, blob: memoryview) -> list[bytes]:
    """Cut the bytes of a BYTES tensor: each element is a 4-byte little-endian length and that many bytes."""
    items: list[bytes] = []
    offset = 0
    while offset < len(blob) and len(items) < count:
        _require(len(blob) - offset >= 4, f"tensor '{name}': truncated in the length of element {len(items)}")
        length = int.from_bytes(blob[offset : offset + 4], "little")
        offset += 4
        _require(length <= len(blob) - offset, f"tensor '{name}': element {len(items)} is longer than the data")
        items.append(bytes(blob[offset : offset + length]))
        offset += length
    _require(
        len(items) == count and offset == len(blob),
        f"tensor '{name}': the data does not hold exactly {count} elements",
    )
    return items


def _to_json(tensor: Tensor) -> list[Any]:
    flat = tensor.array.ravel()
    if tensor.datatype != "BYTES":
        return flat.tolist()
    return [item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item) for item in flat]


def _from_json(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> np.ndarray:
    """Read JSON data, flat in row-major order or nested as ``shape`` says."""
    _require(isinstance(data, list), f"tensor '{name}': 'data' must be a list")
    flat: list[Any] = data
    if data and isinstance(data[0], list):
        _require(bool(shape) and len(flat) == shape[0], f"tensor '{name}': 'data' is not of shape {list(shape)}")
        for size in shape[1:]:
            for part in flat:
                _require(
                    isinstance(part, list) and len(part) == size,
                    f"tensor '{name}': 'data' is not of shape {list(shape)}",
                )
            flat = [item for part in flat for item in part]
    _require(
        len(flat) == math.prod(shape),
        f"tensor '{name}': shape {list(shape)} needs {math.prod(shape)} elements, got {len(flat)}",
    )
    return _from_flat_list(name, datatype, flat, shape)


def _from_flat_list(name: str, datatype: str, flat: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    types = set(map(type, flat))
    dtype = NUMPY_DTYPES[datatype]
    if datatype == "BYTES":
        _require(types <= {str}, f"tensor '{name}': BYTES elements must be strings")
        try:
            return _object_array([item.encode() for item in flat], shape)
        except UnicodeEncodeError as error:
            raise ProtocolError(400, f"tensor '{name}': an element is not valid Unicode") from error
    if dtype.kind == "b":
        _require(types <= {bool}, f"tensor '{name}': BOOL elements must be true or false")
        return np.array(flat, dtype).reshape(shape)
    if dtype.kind == "f":
        _require(types <= {int, float}, f"tensor '{name}': {datatype} elements must be numbers")
        try:
            with np.errstate(over="ignore"):  # reported just below
                array = np.array(flat, "f8").astype(dtype)
        except OverflowError as error:
            raise ProtocolError(400, f"tensor '{name}': an element does not fit {datatype}") from error
        _require(bool(np.isfinite(array).all()), f"tensor '{name}': an element does not fit {datatype}")
        return array.reshape(shape)
    _require(types <= {int}, f"tensor '{name}': {datatype} elements must be whole numbers")
    limits = np.iinfo(dtype)
    _require(
        not flat or (min(flat) >= limits.min and max(flat) <= limits.max),
        f"tensor '{name}': an element does not fit {datatype}",
    )
    return np.array(flat, dtype).reshape(shape)


def _object_array(items: Sequence[bytes], shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array.reshape(shape)


def _parameters(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    parameters = entry.get("parameters", {})
    _require(isinstance(parameters, dict), f"{where}: 'parameters' must be an object")
    return parameters


def _flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    _require(isinstance(value, bool), f"parameter '{name}' must be true or false")
    return value


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a value from JSON is an integer, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ProtocolError(400, message)
