"""Fills a built model from a checkpoint, tensor by tensor, straight into its fused weights."""

from collections.abc import Collection, Sequence

from worker.checkpoint.checkpoint import Checkpoint
from worker.models.model import Model


class WeightMismatch(ValueError):
    """A checkpoint that does not fit the model that its configuration describes."""


def require_tensors(
    model: Model, checkpoint: Checkpoint, known_names: Collection[str], unserved: Sequence[str] = ()
) -> None:
    """Raise ``WeightMismatch`` unless the checkpoint has what ``model`` loads, in its shapes, and nothing unknown.

    ``known_names`` are the tensors that the complete, unshared model has: a sharing layer's K and V projections and the
    layers that a headless model leaves out are skipped knowingly. So are tensors whose names begin with one of
    ``unserved``, such as an image encoder's. Anything beyond them is refused, because a tensor that nobody uses means
    that the model would be computed wrongly.
    """
    slots = list(model.slots())
    available = checkpoint.names()
    missing = [slot.name for slot in slots if slot.name not in available]
    if missing:
        raise WeightMismatch(f"{checkpoint.path} lacks {len(missing)} tensors that the model needs: {_some(missing)}")
    unused = {
        name
        for name in available - set(known_names) - {"lm_head.weight"}
        if not name.endswith("rotary_emb.inv_freq") and not name.startswith(tuple(unserved))
    }
    if unused:
        raise WeightMismatch(
            f"{checkpoint.path} holds {len(unused)} tensors that the model does not use, so it would be computed "
            f"wrongly: {_some(sorted(unused))}"
        )
    for slot in slots:
        shape = checkpoint.shape(slot.name)
        if shape != slot.shape:
            raise WeightMismatch(
                f"{checkpoint.path}: {slot.name} has shape {list(shape)}, the configuration says {list(slot.shape)}"
            )


def load_weights(
    model: Model, checkpoint: Checkpoint, known_names: Collection[str], unserved: Sequence[str] = ()
) -> None:
    """Load every slot of ``model``, after ``require_tensors``."""
    require_tensors(model, checkpoint, known_names, unserved)
    for slot in model.slots():
        for destination, part in slot.reads():
            checkpoint.read_into(slot.name, destination, part)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
