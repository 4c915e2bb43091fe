"""Random JSON schemas of what is supported, every keyword of it, from a seed."""

import random
from typing import Any

Schema = dict[str, Any]

NAMES = ["a", "b", "name", "tags", "größe", 'a"b', "c d"]
STRINGS = ["red", "green", "", 'say "hi"', "Größe\n", "0"]
PATTERNS = ["^[a-z]{2,5}$", "^\\d{3}-\\d{2}$", "^(yes|no)$", "[A-Z][a-z]*", "^[^a-z]{2}ß?$", "^.+\\.$"]
FORMATS = ["date", "ipv4", "uuid", "date-time", "email"]


class SchemaMaker:
    """Makes one schema with its definitions."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: dict[str, Schema] = {}

    def make(self) -> Schema:
        """An object, mostly."""
        schema = self._object(3) if self._random.random() < 0.8 else self._any(3)
        return schema | ({"$defs": self._definitions} if self._definitions else {})

    def _any(self, depth: int) -> Schema:
        leaves = [self._string, self._integer, self._number, self._enum, self._const, self._simple]
        nodes = [self._object, self._array, self._any_of, self._one_of, self._reference, self._several]
        if depth == 0 or self._random.random() < 0.5:
            return self._random.choice(leaves)()
        return self._random.choice(nodes)(depth - 1)

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(NAMES, self._random.randint(0, 4))
        schema: Schema = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        schema["required"] = [name for name in names if self._random.random() < 0.6]
        match self._random.randrange(7):
            case 0 | 1 | 2:
                schema["additionalProperties"] = False
                schema["minProperties"] = self._random.randint(0, len(names))
            case 3:
                schema["additionalProperties"] = self._any(0)
            case 4:
                schema["maxProperties"] = len(names)
            case 5:
                return {
                    "type": "object",
                    "patternProperties": {"^x[0-9]$": self._any(0)},
                    "additionalProperties": False,
                }
        return schema

    def _array(self, depth: int) -> Schema:
        schema: Schema = {"type": "array", "items": self._any(depth)}
        if self._random.random() < 0.3:
            schema["prefixItems"] = [self._any(0) for _ in range(self._random.randint(1, 2))]
        shortest = self._random.randint(0, 2)
        return schema | {"minItems": shortest, "maxItems": max(2, shortest + self._random.randint(0, 2))}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._random.randint(1, 3))]}

    def _one_of(self, depth: int) -> Schema:
        kinds = [
            {"type": "object", "properties": {"kind": {"const": kind}, "x": self._any(depth)}, "required": ["kind"]}
            for kind in ("circle", "square")
        ]
        return {"oneOf": [*kinds, {"type": "null"}]}

    def _reference(self, depth: int) -> Schema:
        name = f"d{len(self._definitions)}"
        self._definitions[name] = {}
        recursive = {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}
        self._definitions[name] = {
            "type": "object",
            "properties": {"value": self._any(depth), "next": recursive},
            "required": ["value", "next"],
        }
        return {"$ref": f"#/$defs/{name}", "description": "the same again"}

    def _several(self, depth: int) -> Schema:
        return {"type": ["string", "integer", "null"], "maxLength": 5, "minimum": 3} | ({} if depth else {"title": "t"})

    def _string(self) -> Schema:
        match self._random.randrange(4):
            case 0:
                return {"type": "string", "pattern": self._random.choice(PATTERNS)}
            case 1:
                return {"type": "string", "format": self._random.choice(FORMATS)}
            case 2:
                shortest = self._random.randint(0, 4)
                return {"minLength": shortest, "maxLength": shortest + self._random.randint(0, 6)}
        return {"type": "string"}

    def _integer(self) -> Schema:
        low = self._random.randint(-50, 50)
        match self._random.randrange(4):
            case 0:
                return {"type": "integer", "minimum": low, "exclusiveMaximum": low + 7.5}
            case 1:
                return {"type": "integer", "multipleOf": self._random.randint(2, 12)}
            case 2:
                return {"type": "integer", "exclusiveMinimum": low}
        return {"type": "integer"}

    def _number(self) -> Schema:
        low = self._random.randint(-50, 50) / 4
        match self._random.randrange(3):
            case 0:
                return {"type": "number", "minimum": low, "maximum": low + 2.5}
            case 1:
                return {"maximum": low}
        return {"type": "number"}

    def _enum(self) -> Schema:
        return {"enum": [*self._random.sample(STRINGS, 2), self._random.randint(0, 99), None]}

    def _const(self) -> Schema:
        return {"const": self._random.choice([*STRINGS, {"k": [1, True]}, 7])}

    def _simple(self) -> Schema:
        return self._random.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])
