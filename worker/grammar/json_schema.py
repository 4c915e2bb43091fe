"""JSON schemas, made into what XGrammar enforces in full.

XGrammar ignores some keywords, and some together with others. A schema that is let through here means the same with and
without what is ignored; what would not is refused by its keyword and place, or said differently: a text that follows
the grammar validates. ``format`` is about shape: there may be a 30th of February.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from worker.grammar.grammar import GrammarError
from worker.grammar.json_types import Extent, is_a
from worker.grammar.pattern import json_pattern, length_pattern

MAX_DEPTH = 64

_NUMERIC = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_KEYWORDS_OF_TYPE: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": _NUMERIC,
    "number": _NUMERIC,
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    },
    "boolean": set(),
    "null": set(),
}
TYPED = set[str]().union(*_KEYWORDS_OF_TYPE.values())
WHOLE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
"""Keywords that say by themselves what a value is. XGrammar looks at one of them and at nothing beside it."""
_UNSUPPORTED = {
    "not",
    "if",
    "then",
    "else",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "additionalItems",
    "unevaluatedItems",
    "unevaluatedProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$anchor",
    "$dynamicAnchor",
    "$dynamicRef",
    "$recursiveAnchor",
    "$recursiveRef",
    "extends",
    "disallow",
    "divisibleBy",
}
_FORMATS = {
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "uri-reference",
    "uri-template",
    "json-pointer",
    "relative-json-pointer",
}
_IPV4 = r"^(?:(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])$"


@dataclass(frozen=True, slots=True)
class EnforceableSchema:
    """A schema as XGrammar is given it, as JSON, and the regular expressions in it."""

    text: str
    patterns: frozenset[str]


def enforceable(text: str) -> EnforceableSchema:
    """Return what XGrammar is given for a schema; raise ``GrammarError`` naming the keyword that cannot be enforced."""
    try:
        walk = _Walk(_parsed(text))
        return EnforceableSchema(json.dumps(walk.schema), frozenset(walk.patterns))
    except RecursionError:  # of values within, whose depth is not limited otherwise
        raise GrammarError(f"the JSON schema is nested more than {MAX_DEPTH} deep") from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from None


class _Walk:
    """One schema's way through; ``schema`` is the result."""

    def __init__(self, schema: Any) -> None:
        self.patterns: set[str] = set()
        self._places: set[str] = set()
        self._references: list[tuple[str, str]] = []
        self.schema = self._of(schema, "#", 0)
        for place, reference in self._references:
            if _unescaped(reference) not in self._places or "/oneOf/" in reference:
                raise _refused(place, "$ref", f"{reference!r:.100} leads to no schema of this document")

    def _of(self, schema: Any, place: str, depth: int) -> Any:
        """Return what is given for one schema, a boolean or an object; ``place`` is its JSON pointer."""
        if depth > MAX_DEPTH:
            raise GrammarError(f"the JSON schema is nested more than {MAX_DEPTH} deep")
        self._places.add(place)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError(f"JSON schema, {place}: a schema is an object or a boolean, not {_shown(schema)}")
        for keyword in schema:
            if keyword in _UNSUPPORTED and not (keyword == "uniqueItems" and schema[keyword] is False):
                raise _refused(place, keyword, "is not supported")
        if "$id" in schema and depth:
            raise _refused(place, "$id", "is not supported within a schema")
        result: dict[str, Any] = {}
        for keyword in ("$defs", "definitions"):
            if keyword in schema:
                result[keyword] = self._named(schema, keyword, place, depth)
        whole = [keyword for keyword in WHOLE if keyword in schema]
        return result | (self._whole(schema, whole, place, depth) if whole else self._typed(schema, place, depth))

    def _named(self, schema: dict[str, Any], keyword: str, place: str, depth: int) -> dict[str, Any]:
        """Return the schemas of an object that has them by name."""
        if not isinstance(schema[keyword], dict):
            raise _refused(place, keyword, f"is {_shown(schema[keyword])}, not an object")
        return {
            name: self._of(value, f"{place}/{keyword}/{name}", depth + 1) for name, value in schema[keyword].items()
        }

    def _listed(self, schema: dict[str, Any], keyword: str, place: str, depth: int) -> list[Any]:
        """Return the schemas of a list."""
        if not isinstance(schema[keyword], list) or not schema[keyword]:
            raise _refused(place, keyword, f"is {_shown(schema[keyword])}, not a list of schemas")
        return [self._of(value, f"{place}/{keyword}/{i}", depth + 1) for i, value in enumerate(schema[keyword])]

    # What says by itself what a value is

    def _whole(self, schema: dict[str, Any], whole: list[str], place: str, depth: int) -> dict[str, Any]:
        keyword = whole[0]
        beside = [other for other in (*whole[1:], *sorted(TYPED)) if other in schema]
        if keyword not in ("enum", "const") and "type" in schema:
            beside.append("type")
        if beside:
            raise _refused(place, beside[0], f"is not supported beside {keyword}")
        match keyword:
            case "$ref":
                return {"$ref": self._reference(schema["$ref"], place)}
            case "enum":
                return {"enum": [_of_type(value, schema, place, "enum") for value in _values(schema["enum"], place)]}
            case "const":
                return {"const": _of_type(schema["const"], schema, place, "const")}
        alternatives = self._listed(schema, keyword, place, depth)
        if keyword == "allOf" and len(alternatives) > 1:
            raise _refused(place, "allOf", "of several schemas is not supported")
        if keyword == "oneOf":
            _require_disjoint(alternatives, place)
            return {"anyOf": alternatives}
        return {keyword: alternatives}

    def _reference(self, reference: Any, place: str) -> str:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise _refused(place, "$ref", f"is {_shown(reference)}; only references within the schema are supported")
        self._references.append((place, reference))
        return reference

    # What has a type

    def _typed(self, schema: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        types = _types(schema, place)
        result: dict[str, Any] = {} if types is None else {"type": types[0] if len(types) == 1 else types}
        if types is None:
            return result
        if "string" in types:
            result |= self._string(schema, place)
        if "integer" in types or "number" in types:
            result |= _number(schema, place, whole="number" not in types)
        if "array" in types:
            result |= self._array(schema, place, depth)
        if "object" in types:
            result |= self._object(schema, place, depth)
        return result

    def _string(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        stated = schema.get("format")
        known = isinstance(stated, str) and stated in _FORMATS
        lengths = [keyword for keyword in ("minLength", "maxLength") if keyword in schema]
        if "pattern" in schema and (known or lengths):
            raise _refused(place, "format" if known else lengths[0], "is not supported beside pattern")
        if known and lengths:
            raise _refused(place, lengths[0], "is not supported beside format")
        if "pattern" in schema:
            return {"pattern": self._pattern(schema["pattern"], "pattern", place)}
        if known:
            return {"pattern": _IPV4} if stated == "ipv4" else {"format": stated}
        if lengths:
            shortest = _count(schema, "minLength", place) if "minLength" in schema else 0
            longest = _count(schema, "maxLength", place) if "maxLength" in schema else None
            if longest is not None and shortest > longest:
                raise _refused(place, "minLength", f"is {shortest}, which is more than maxLength, {longest}")
            return {"pattern": length_pattern(shortest, longest)}
        return {}

    def _pattern(self, pattern: Any, keyword: str, place: str) -> str:
        if not isinstance(pattern, str):
            raise _refused(place, keyword, f"is {_shown(pattern)}, not a regular expression")
        try:
            ascii_pattern = json_pattern(pattern)
        except GrammarError as error:
            raise _refused(place, keyword, str(error)) from None
        self.patterns.add(ascii_pattern)
        return ascii_pattern

    def _array(self, schema: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {k: _count(schema, k, place) for k in ("minItems", "maxItems") if k in schema}
        if "prefixItems" in schema:
            result["prefixItems"] = self._listed(schema, "prefixItems", place, depth)
        if isinstance(schema.get("items"), list):
            raise _refused(place, "items", "is a list, which is not supported; use prefixItems")
        elif result and "prefixItems" not in result:
            result["items"] = True
        if "items" in schema:
            result["items"] = self._of(schema["items"], f"{place}/items", depth + 1)
        return result

    def _object(self, schema: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {
            k: _count(schema, k, place) for k in ("minProperties", "maxProperties") if k in schema
        }
        if "properties" in schema:
            result["properties"] = self._named(schema, "properties", place, depth)
        if "additionalProperties" in schema:
            additional = schema["additionalProperties"]
            result["additionalProperties"] = self._of(additional, f"{place}/additionalProperties", depth + 1)
        if "patternProperties" in schema:
            patterns = self._named(schema, "patternProperties", place, depth)
            if "properties" in schema or len(patterns) > 1:
                raise _refused(place, "patternProperties", "is supported for one pattern and without properties")
            result["patternProperties"] = {
                self._pattern(pattern, "patternProperties", place): value for pattern, value in patterns.items()
            }
        if "propertyNames" in schema:
            if "properties" in schema or "patternProperties" in schema:
                raise _refused(place, "propertyNames", "is not supported beside properties or patternProperties")
            names = schema["propertyNames"]
            result["propertyNames"] = self._of(
                {"type": "string"} | names if isinstance(names, dict) else names, f"{place}/propertyNames", depth + 1
            )
        return result | self._required(schema, result, place)

    def _required(self, schema: dict[str, Any], result: dict[str, Any], place: str) -> dict[str, Any]:
        """Return ``required``, and ``properties`` with all that it names: others are not asked for."""
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _refused(place, "required", f"is {_shown(required)}, not a list of names")
        properties = dict(result.get("properties", {}))
        additional = result.get("additionalProperties", True)
        for name in required:
            if name not in properties:
                if additional is False or "patternProperties" in result or "propertyNames" in result:
                    raise _refused(place, "required", f"names {name!r:.60}, which is not among the properties")
                properties[name] = additional
        open_ended = result.get("additionalProperties", not properties) is not False or "patternProperties" in result
        if result.get("minProperties", 0) > len(set(required)) and open_ended:
            raise _refused(place, "minProperties", "is supported where additionalProperties is false")
        return ({"properties": properties} if properties else {}) | ({"required": required} if required else {})


def _types(schema: dict[str, Any], place: str) -> list[str] | None:
    """Return the types of a value; None for any. Without a ``type``, they are those that its keywords are about."""
    stated = schema.get("type")
    if stated is None:
        meant = {"number" if t == "integer" else t for t, words in _KEYWORDS_OF_TYPE.items() if words & schema.keys()}
        if len(meant) > 1:
            raise GrammarError(f"JSON schema, {place}: type is missing, and {' or '.join(sorted(meant))} would fit")
        return sorted(meant) or None
    types = stated if isinstance(stated, list) else [stated]
    for name in types or [stated]:
        if not isinstance(name, str) or name not in _KEYWORDS_OF_TYPE:
            raise _refused(place, "type", f"is {_shown(name)}; there are {', '.join(_KEYWORDS_OF_TYPE)}")
    return list(dict.fromkeys(types))


def _number(schema: dict[str, Any], place: str, *, whole: bool) -> dict[str, Any]:
    """Return the bounds. Those of whole numbers are whole."""
    bounds: dict[str, Any] = {}
    for keyword in sorted(_NUMERIC & schema.keys()):
        value = schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _refused(place, keyword, f"is {_shown(value)}, not a number")
        bounds[keyword] = value
    if "multipleOf" in bounds and not (whole and is_a(bounds["multipleOf"], "integer") and bounds["multipleOf"] > 0):
        raise _refused(place, "multipleOf", "is supported for integers and as a whole number above 0")
    if "multipleOf" in bounds and len(bounds) > 1:
        raise _refused(place, "multipleOf", "is not supported beside bounds")
    if not whole:
        return bounds
    lower = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
    lower += [math.floor(bounds["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in bounds else []
    upper = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
    upper += [math.ceil(bounds["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in bounds else []
    result = {"minimum": max(lower)} if lower else {}
    result |= {"maximum": min(upper)} if upper else {}
    return result | ({"multipleOf": int(bounds["multipleOf"])} if "multipleOf" in bounds else {})


def _count(schema: dict[str, Any], keyword: str, place: str) -> int:
    value = schema[keyword]
    if not is_a(value, "integer") or value < 0:
        raise _refused(place, keyword, f"is {_shown(value)}, not a whole number from 0")
    return int(value)


def _values(values: Any, place: str) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise _refused(place, "enum", f"is {_shown(values)}, not a list of values")
    return values


def _of_type(value: Any, schema: dict[str, Any], place: str, keyword: str) -> Any:
    """Return a value of ``enum`` or ``const``, which must be of the type that is stated beside it."""
    types = _types({"type": schema["type"]}, place) if "type" in schema else None
    if types is not None and not any(is_a(value, name) for name in types):
        raise _refused(place, keyword, f"holds {_shown(value)}, which is not a {' or '.join(types)}")
    return value


def _require_disjoint(alternatives: list[Any], place: str) -> None:
    """Refuse ``oneOf`` unless no value fits two alternatives, which are enforceable already: then it is ``anyOf``."""
    known = len(alternatives) <= MAX_DEPTH and all(isinstance(one, dict) for one in alternatives)
    extents = [Extent.of(one) for one in alternatives] if known else []
    if not known or not all(a.disjoint(b) for i, a in enumerate(extents) for b in extents[:i]):
        raise _refused(place, "oneOf", "is not supported where a value may fit two of its schemas; use anyOf")


def _unescaped(pointer: str) -> str:
    """Return a JSON pointer as places are kept: names as they are."""
    return "/".join(part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/"))


def _refused(place: str, keyword: str, why: str) -> GrammarError:
    return GrammarError(f"JSON schema, {place}: {keyword} {why}")


def _shown(value: Any) -> str:
    return f"{json.dumps(value, default=str):.60}"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def schemas_of_tag(tag: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a structural tag that hold a JSON schema."""
    if isinstance(tag, dict):
        if "json_schema" in tag:
            yield tag
        else:
            for value in tag.values():
                yield from schemas_of_tag(value)
    elif isinstance(tag, list):
        for value in tag:
            yield from schemas_of_tag(value)
