"""Cross-layer KV sharing: which layer reads which other layer's cache, and the rules that such a map must keep.

A rule is parsed from ``--kv-sharing`` before anything starts, resolved against a model's layer names when the model is
built, and validated against its attention layers. Afterwards each layer carries its own target and nobody asks again.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from worker.kv_cache.specs import LayerName

Targets = Mapping[LayerName, LayerName]
"""From each sharing layer to its target. Owners are absent."""


class SharingError(ValueError):
    """A sharing rule that cannot be parsed, or that a model cannot honour."""


@dataclass(frozen=True, slots=True)
class ModelDeclared:
    """What the checkpoint's own configuration says: ``--kv-sharing model``."""

    def resolve(self, names: Sequence[LayerName], declared: Targets) -> Targets:
        """Return the declared map."""
        del names
        return declared


@dataclass(frozen=True, slots=True)
class NoSharing:
    """Every layer owns its cache: ``--kv-sharing none``."""

    def resolve(self, names: Sequence[LayerName], declared: Targets) -> Targets:
        """Return an empty map."""
        del names, declared
        return {}


@dataclass(frozen=True, slots=True)
class EveryNth:
    """Of each ``period`` consecutive layers the first owns and the others share it: ``--kv-sharing every:2``."""

    period: int

    def resolve(self, names: Sequence[LayerName], declared: Targets) -> Targets:
        """Map each layer to the first of its run."""
        del declared
        return {name: names[i - i % self.period] for i, name in enumerate(names) if i % self.period}


@dataclass(frozen=True, slots=True)
class AfterLayer:
    """Every layer later than ``layer`` uses that layer's cache: ``--kv-sharing after:17``."""

    layer: int

    def resolve(self, names: Sequence[LayerName], declared: Targets) -> Targets:
        """Map every later layer to the layer with this index."""
        del declared
        if self.layer >= len(names):
            raise SharingError(
                f"--kv-sharing after:{self.layer}: the model has attention layers 0 to {len(names) - 1}; "
                f"use a smaller index"
            )
        return dict.fromkeys(names[self.layer + 1 :], names[self.layer])


@dataclass(frozen=True, slots=True)
class ExplicitMap:
    """A map from layer names to target names, read from a JSON file: ``--kv-sharing FILE.json``."""

    targets: tuple[tuple[LayerName, LayerName], ...]

    def resolve(self, names: Sequence[LayerName], declared: Targets) -> Targets:
        """Return the map; a key that is no layer is refused here, a bad target by ``validate_targets``."""
        del declared
        for layer, target in self.targets:
            if layer not in names:
                raise SharingError(
                    f"--kv-sharing: {layer} (to share {target}) is not an attention layer of this model; "
                    f"its layers are {names[0]} … {names[-1]}"
                )
        return dict(self.targets)


SharingRule = ModelDeclared | NoSharing | EveryNth | AfterLayer | ExplicitMap


def parse_sharing(text: str) -> SharingRule:
    """Parse ``model``, ``none``, ``every:N``, ``after:N``, the path of a JSON file, or JSON text itself.

    Raises ``SharingError`` with what was given and what is possible.
    """
    kind, _, number = text.partition(":")
    match kind:
        case "model" if not number:
            return ModelDeclared()
        case "none" if not number:
            return NoSharing()
        case "every":
            return EveryNth(_natural(text, number, minimum=2))
        case "after":
            return AfterLayer(_natural(text, number, minimum=0))
    if text.lstrip().startswith("{"):
        return _explicit("--kv-sharing", text)
    try:
        content = Path(text).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise SharingError(
            f"--kv-sharing {text!r} is neither 'model', 'none', 'every:N', 'after:N' nor a JSON file that can be read"
        ) from error
    return _explicit(text, content)


def _natural(text: str, number: str, minimum: int) -> int:
    if not (number.isascii() and number.isdigit() and len(number) < 7 and int(number) >= minimum):
        raise SharingError(f"--kv-sharing {text!r}: after the colon must stand a whole number of at least {minimum}")
    return int(number)


def _explicit(source: str, text: str) -> ExplicitMap:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SharingError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(target, str) for target in content.values()):
        raise SharingError(f"{source} must be a JSON object from layer names to target layer names")
    return ExplicitMap(tuple((LayerName(layer), LayerName(target)) for layer, target in content.items()))


class SharableLayer(Protocol):
    """What validation needs to know of an attention layer. ``attention_type`` says full, a window, or latent."""

    @property
    def name(self) -> LayerName:
        """Fully qualified name."""
        ...

    @property
    def attention_type(self) -> str:
        """What it attends to, window included."""
        ...

    @property
    def kv_heads(self) -> int:
        """KV heads; 1 for a latent."""
        ...

    @property
    def head_dim(self) -> int:
        """Size of a head, or of the latent."""
        ...

    @property
    def kv_sharing_target_layer_name(self) -> LayerName | None:
        """The layer whose cache it uses, or None."""
        ...


def validate_targets(layers: Iterable[SharableLayer]) -> None:
    """Check every sharing layer against its target; ``layers`` are in the order in which they run.

    A target must be an attention layer of the model, of the same attention type and window, come earlier, own its
    cache, and have the same KV heads and head size. Raises ``SharingError`` that names both layers.
    """
    ordered = list(layers)
    by_name = {layer.name: layer for layer in ordered}
    order = {layer.name: index for index, layer in enumerate(ordered)}
    for layer in ordered:
        target_name = layer.kv_sharing_target_layer_name
        if target_name is None:
            continue
        pair = f"KV sharing: {layer.name} cannot use the cache of {target_name}"
        target = by_name.get(target_name)
        if target is None:
            raise SharingError(f"{pair}: no attention layer has that name")
        if target.attention_type != layer.attention_type:
            raise SharingError(f"{pair}: their attention types differ, {layer.attention_type}, {target.attention_type}")
        if order[target.name] >= order[layer.name]:
            raise SharingError(f"{pair}: the target must come earlier in the model")
        if target.kv_sharing_target_layer_name is not None:
            raise SharingError(
                f"{pair}: that layer owns no cache, it uses {target.kv_sharing_target_layer_name}; name that one"
            )
        if (target.kv_heads, target.head_dim) != (layer.kv_heads, layer.head_dim):
            raise SharingError(
                f"{pair}: {layer.kv_heads} KV heads of {layer.head_dim} against {target.kv_heads} of {target.head_dim}"
            )
