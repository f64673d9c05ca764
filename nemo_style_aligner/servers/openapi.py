"""The OpenAPI 3.1 description of a service, made from its endpoints. Served at ``/openapi.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import nemo_style_aligner
from nemo_style_aligner.servers.endpoints import (
    MAX_RUN_ID_LENGTH,
    MODEL_VERSION,
    Endpoint,
    InferEndpoint,
    RestoreEndpoint,
    SaveEndpoint,
    TensorSpec,
    TrainEndpoint,
)
from nemo_style_aligner.servers.exactly_once.ledger import INITIAL_HISTORY
from nemo_style_aligner.servers.protocol import (
    HEADER_LENGTH_FIELD,
    JSON_TYPE,
    LIVE_PATH,
    MAX_DIMENSION_SIZE,
    READY_PATH,
)
from nemo_style_aligner.servers.request_log import REQUEST_ID_HEADER
from nemo_style_aligner.servers.signing import CHALLENGE_HEADER, PROOF_HEADER

Schema = dict[str, Any]

_ELEMENTS: Mapping[str, Schema] = {
    "INT64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "FP32": {"type": "number", "minimum": -3.4e38, "maximum": 3.4e38},
    "BYTES": {"type": "string"},
}
_SIZE: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_DIMENSION_SIZE}
_PROOF: Schema = {
    "description": f"If the request has {CHALLENGE_HEADER}: the proof that the service knows the secret",
    "schema": {"type": "string"},
}
_ERRORS = {
    400: "The request is malformed; the message says what is wrong",
    401: "The token is missing or wrong",
    404: "No such model, version or route",
    409: "The critic is not at the position that the request gives: it expects another number "
    "(X-Expected-Sequence-Number), or has another history (X-Critic-History)",
    413: "The body is larger than the limit",
    415: "Unknown Content-Encoding",
    429: "Too many requests are waiting: try again after Retry-After seconds",
    500: "The model failed, or its answer cannot be written as JSON",
    503: "The service is starting or shutting down: try again after Retry-After seconds",
    504: "No answer within the time limit",
}


def describe(endpoints: Sequence[Endpoint], *, needs_token: bool) -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, Any] = {
        "/v2": {"get": _read("Server metadata", _ref("ServerMetadata"))},
        LIVE_PATH: {"get": _health("Whether the service has not failed")},
        READY_PATH: {"get": _health("Whether the models answer")},
        "/v2/models/stats": {"get": _read("Statistics of all models", _ref("Statistics"))},
        "/v2/repository/index": {"post": _repository_index()},
        "/metrics": {"get": _metrics()},
        "/openapi.json": {"get": _read("This description", {"type": "object"})},
    }
    for endpoint in endpoints:
        for path in (f"/v2/models/{endpoint.name}", f"/v2/models/{endpoint.name}/versions/{MODEL_VERSION}"):
            name = endpoint.name
            paths[path] = {"get": _read(f"Metadata of {name}", _ref("ModelMetadata"), 404)}
            paths[f"{path}/ready"] = {"get": _health(f"Whether {name} answers", 404)}
            paths[f"{path}/config"] = {
                "get": {**_read(f"Configuration of {name}", _ref("ModelConfig"), 404), "security": []}
            }
            paths[f"{path}/stats"] = {"get": _read(f"Statistics of {name}", _ref("Statistics"), 404)}
            paths[f"{path}/infer"] = {"post": _infer(endpoint)}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Critic and reward service",
            "version": nemo_style_aligner.__version__,
            "description": "Open Inference Protocol v2 over HTTP, with the binary tensor extension.",
        },
        "paths": paths,
        "components": {"schemas": _SCHEMAS},
    }
    if needs_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _answer(description: str, content: Mapping[str, Schema] | None = None) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": description,
        "headers": {REQUEST_ID_HEADER: {"required": True, "schema": {"type": "string"}}, PROOF_HEADER: _PROOF},
    }
    if content is not None:
        answer["content"] = {kind: {"schema": schema} for kind, schema in content.items()}
    return answer


def _errors(*statuses: int) -> dict[str, Any]:
    return {str(status): _answer(_ERRORS[status], {JSON_TYPE: _ref("Error")}) for status in statuses}


def _read(summary: str, schema: Schema, *statuses: int) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {"200": _answer(summary, {JSON_TYPE: schema}), **_errors(401, *statuses)},
    }


def _health(summary: str, *statuses: int) -> dict[str, Any]:
    return {
        "summary": summary,
        "security": [],
        "responses": {"200": _answer("Yes"), "503": _answer("No"), **_errors(*statuses)},
    }


def _metrics() -> dict[str, Any]:
    return {
        "summary": "Metrics for Prometheus",
        "responses": {"200": _answer("Metrics", {"text/plain": {"type": "string"}}), **_errors(401)},
    }


def _repository_index() -> dict[str, Any]:
    content = {JSON_TYPE: {"schema": {"type": "object", "properties": {"ready": {"type": "boolean"}}}}}
    answer = _read("The models", {"type": "array", "items": _ref("RepositoryEntry")}, 400, 413, 415)
    return {**answer, "requestBody": {"required": False, "content": content}}


def _infer(endpoint: Endpoint) -> dict[str, Any]:
    binary = {"type": "string", "format": "binary"}
    header = {
        "name": HEADER_LENGTH_FIELD,
        "in": "header",
        "description": "Length of the JSON part of a binary request; raw tensor data follow it",
        "schema": {"type": "integer", "minimum": 0},
    }
    return {
        "summary": f"Run {endpoint.name}",
        "parameters": [header],
        "requestBody": {
            "required": True,
            "content": {
                JSON_TYPE: {"schema": _request_schema(endpoint)},
                "application/octet-stream": {"schema": binary},
            },
        },
        "responses": {
            "200": _answer(
                "The outputs",
                {JSON_TYPE: _response_schema(endpoint), "application/octet-stream": binary},
            ),
            **_errors(400, 401, 404, 409, 413, 415, 429, 500, 503, 504),
        },
    }


def _request_schema(endpoint: Endpoint) -> Schema:
    outputs = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"enum": list(endpoint.outputs)},
            "parameters": {"type": "object", "properties": {"binary_data": {"type": "boolean"}}},
        },
    }
    parameters: dict[str, Schema] = {
        "binary_data_output": {"type": "boolean", "description": "Outputs as raw bytes"},
        "timeout": {
            "type": "integer",
            "minimum": 0,
            "maximum": 2**63 - 1,
            "description": "Microseconds; 0: the service's limit",
        },
    }
    name: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_RUN_ID_LENGTH, "pattern": "^[ -~]+$"}
    if isinstance(endpoint, RestoreEndpoint):
        parameters["run_id"] = name
    else:  # where the critic must be; 409 if it is elsewhere
        parameters |= {"run_id": name, "history": name}
        parameters["sequence_number"] = {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}
    if isinstance(endpoint, SaveEndpoint):
        parameters["keep_history"] = name
    inputs = [_tensor(endpoint, spec) for spec in endpoint.inputs.values()]
    required = sum(not spec.optional for spec in endpoint.inputs.values())
    example = _example(endpoint)
    return {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": {"type": "object", "properties": parameters},
            "inputs": {"type": "array", "items": {"oneOf": inputs}, "minItems": max(1, required)},
            "outputs": {"type": "array", "items": outputs},
        },
        **({} if example is None else {"examples": [example]}),
    }


def _tensor(endpoint: Endpoint, spec: TensorSpec) -> Schema:
    dims = endpoint.full_shape(spec)
    element = _ELEMENTS[spec.datatype]
    nested: Schema = element
    for _ in dims[1:]:
        nested = {"type": "array", "items": nested}
    shape: Schema = {"type": "array", "items": _SIZE, "minItems": len(dims), "maxItems": len(dims)}
    if min(dims) >= 0:
        shape = {"const": dims}
    data = {"type": "array", "items": element if nested is element else {"anyOf": [element, nested]}}
    return {
        "type": "object",
        "required": ["name", "datatype", "shape", "data"],
        "properties": {
            "name": {"const": spec.name},
            "datatype": {"const": spec.datatype},
            "shape": shape,
            "data": data,
            "parameters": {"type": "object"},
        },
    }


def _response_schema(endpoint: Endpoint) -> Schema:
    outputs = {"type": "array", "items": {"oneOf": [_tensor(endpoint, spec) for spec in endpoint.outputs.values()]}}
    return {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            "model_name": {"const": endpoint.name},
            "model_version": {"const": MODEL_VERSION},
            "id": {"type": "string"},
            "outputs": outputs,
        },
    }


def _example(endpoint: Endpoint) -> dict[str, Any] | None:
    """A request that a new service answers with 200."""

    def tensor(name: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
        return {"name": name, "datatype": endpoint.inputs[name].datatype, "shape": shape, "data": data}

    if isinstance(endpoint, InferEndpoint):
        return {"inputs": [tensor("tokens", [1, 3], [1, 2, 3]), tensor("sequence_lengths", [1, 1], [3])]}
    if isinstance(endpoint, TrainEndpoint):
        rest = [tensor(name, [1, 2], [0.5, 0.5]) for name in ("returns", "prev_values")]
        return {"inputs": [tensor("tokens", [1, 3], [1, 2, 3]), *rest, tensor("mask", [1, 2], [0.0, 1.0])]}
    if isinstance(endpoint, SaveEndpoint):
        return {"inputs": [tensor("dummy_var", [1], [0])]}
    if isinstance(endpoint, RestoreEndpoint):
        return {"inputs": [tensor("histories", [1], [INITIAL_HISTORY])], "parameters": {"run_id": "a"}}
    return None


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_SIZES: Schema = {"type": "array", "items": {"type": "integer"}}
_TOTAL = _object({"count": _COUNT, "ns": _COUNT})
_TOTALS: Schema = {"type": "object", "additionalProperties": _TOTAL}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_SCHEMAS: dict[str, Schema] = {
    "Error": {**_object({"error": _TEXT}), "additionalProperties": False},
    "ServerMetadata": _object({"name": _TEXT, "version": _TEXT, "extensions": _list(_TEXT)}),
    "ModelMetadata": _object(
        {
            "name": _TEXT,
            "versions": _list(_TEXT),
            "platform": _TEXT,
            "inputs": _list(_object({"name": _TEXT, "datatype": _TEXT, "shape": _SIZES})),
            "outputs": _list(_object({"name": _TEXT, "datatype": _TEXT, "shape": _SIZES})),
            "parameters": {
                "type": "object",
                "properties": {
                    "max_sequence_length": _COUNT,
                    "vocab_size": _COUNT,
                    "tokenizer": _TEXT,
                    "max_body_bytes": _COUNT,
                },
            },
        }
    ),
    "ModelConfig": _object(
        {
            "name": _TEXT,
            "platform": _TEXT,
            "backend": _TEXT,
            "max_batch_size": _COUNT,
            "input": _list(_object({"name": _TEXT, "data_type": _TEXT, "dims": _SIZES})),
            "output": _list(_object({"name": _TEXT, "data_type": _TEXT, "dims": _SIZES})),
        },
        {"dynamic_batching": _object({"preferred_batch_size": _list(_COUNT), "max_queue_delay_microseconds": _COUNT})},
    ),
    "RepositoryEntry": _object({"name": _TEXT, "version": _TEXT, "state": _TEXT, "reason": _TEXT}),
    "Statistics": _object(
        {
            "model_stats": _list(
                _object(
                    {
                        "name": _TEXT,
                        "version": _TEXT,
                        "last_inference": _COUNT,
                        "inference_count": _COUNT,
                        "execution_count": _COUNT,
                        "inference_stats": _TOTALS,
                        "batch_stats": _list({"type": "object", "required": ["batch_size"]}),
                    }
                )
            )
        }
    ),
}
