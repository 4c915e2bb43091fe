"""Types of JSON values, and whether two schemas have a value in common."""

import json
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Extent:
    """What is plain of the values that fit a schema: their types, what they are if they are listed, and which values
    properties have that all of them have. Values are texts that all equal ones have in common."""

    kinds: frozenset[str]
    values: frozenset[str] | None
    properties: dict[str, frozenset[str]]

    @staticmethod
    def of(schema: dict[str, Any]) -> "Extent":
        """Of a schema that is enforceable."""
        properties = schema.get("properties", {})
        required = {name: properties.get(name) for name in schema.get("required", ())}
        listed = {name: _listed(part) for name, part in required.items() if isinstance(part, dict)}
        told = {name: values for name, values in listed.items() if values is not None}
        return Extent(frozenset(_kinds(schema)), _listed(schema), told)

    def disjoint(self, other: "Extent") -> bool:
        """Whether plainly no value fits both: by type, by values, or by a property that tells them apart."""
        if self.values is not None and other.values is not None:
            return self.values.isdisjoint(other.values)
        if not (self.kinds & other.kinds):
            return True
        if self.kinds | other.kinds != {"object"}:
            return False
        shared = self.properties.keys() & other.properties.keys()
        return any(self.properties[name].isdisjoint(other.properties[name]) for name in shared)


def _listed(schema: dict[str, Any]) -> frozenset[str] | None:
    values = _closed(schema)
    return None if values is None else frozenset(_canonical(value) for value in values)


def _canonical(value: Any) -> str:
    """Return a text that all equal values have in common, however numbers are written and names are ordered."""
    parsed = json.loads(json.dumps(value), parse_int=_number, parse_float=_number)
    return json.dumps(parsed, sort_keys=True)


def _number(text: str) -> float:
    return float(text) + 0.0  # there is no negative zero


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
