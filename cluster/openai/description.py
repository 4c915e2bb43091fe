"""The API's description, as OpenAPI has it: made once from the request bodies' own types."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cluster.openai.error_code import ErrorCode
from cluster.openai.protocol import ChatCompletionBody, CompletionBody, DetokenizeBody, TokenizeBody

_BODIES: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/chat/completions": (ChatCompletionBody, "Continue a conversation."),
    "/v1/completions": (CompletionBody, "Continue a text."),
    "/tokenize": (TokenizeBody, "Turn a text or a conversation into token ids."),
    "/detokenize": (DetokenizeBody, "Turn token ids into a text."),
}
_READS = {
    "/v1/models": "List the model.",
    "/v1/models/{name}": "Describe the model.",
    "/tokenizer_info": "Show the tokenizer's special tokens and its chat template.",
    "/version": "Name the release of this server.",
    "/cluster": "Report every replica's load and counters.",
    "/requests": "List requests that this front end serves or has served lately, the last that arrived first.",
    "/requests/{request_id}": "Show when what happened to one of them.",
    "/latency": "Report this front end's percentiles of the last minutes, in seconds.",
    "/health": "200 while a request could be served, else 503. Needs no key.",
    "/ping": "The same as /health.",
    "/metrics": "Show metrics in Prometheus' text format. Needs no key.",
}
_PARAMETERS: dict[str, list[dict[str, Any]]] = {
    "/v1/models/{name}": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
    "/requests": [{"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1}}],
    "/requests/{request_id}": [{"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}}],
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string", "enum": [code.text for code in ErrorCode]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def describe_api() -> dict[str, Any]:
    """Return the document. Answers are described by status alone, errors also by their shape."""
    references, definitions = models_json_schema(
        [(kind, "validation") for kind, _ in _BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for path, (kind, summary) in _BODIES.items():
        content = {"application/json": {"schema": references[kind, "validation"]}}
        paths[path] = {"post": _operation(summary) | {"requestBody": {"required": True, "content": content}}}
    for path, summary in _READS.items():
        paths[path] = {"get": _operation(summary) | {"parameters": _PARAMETERS.get(path, [])}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "crosskv", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"] | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(summary: str) -> dict[str, Any]:
    failed = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "summary": summary,
        "responses": {"200": {"description": "It was done."}, "4XX": {"description": "It was not.", "content": failed}},
    }
