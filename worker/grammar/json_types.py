"""Types of JSON values, and whether two schemas have a value in common."""

import json
from typing import Any

TYPES = ("string", "integer", "number", "array", "object", "boolean", "null")


def is_a(value: Any, name: str) -> bool:
    """Whether a value is of a type; a whole number is an integer however it is written."""
    match name:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return is_a(value, "number") and (isinstance(value, int) or value.is_integer())
        case "number":
            return not isinstance(value, bool) and isinstance(value, int | float)
    return isinstance(value, {"string": str, "array": list, "object": dict}[name])


def disjoint(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether plainly no value fits both: by type, by values, or by a property that tells them apart."""
    values, others = _closed(a), _closed(b)
    if values is not None and others is not None:
        return not any(json.dumps(value) == json.dumps(other) or value == other for value in values for other in others)
    kinds, other_kinds = _kinds(a), _kinds(b)
    if not (kinds & other_kinds):
        return True
    if kinds | other_kinds != {"object"}:
        return False
    shared = set(a.get("required", ())) & set(b.get("required", ()))
    fields = ((a.get("properties", {}).get(name), b.get("properties", {}).get(name)) for name in shared)
    return any(
        isinstance(x, dict) and isinstance(y, dict) and _closed(x) and _closed(y) and disjoint(x, y) for x, y in fields
    )


def _closed(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _kinds(schema: dict[str, Any]) -> set[str]:
    """Return the types of values that may fit, as far as a schema says so itself."""
    every = {*TYPES} - {"integer"}
    if (values := _closed(schema)) is not None:
        return {name for name in every if any(is_a(value, name) for value in values)}
    stated = schema.get("type")
    if "$ref" in schema or "anyOf" in schema or "allOf" in schema or stated is None:
        return every
    return {"number" if name == "integer" else str(name) for name in (stated if isinstance(stated, list) else [stated])}
