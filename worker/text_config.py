"""What a checkpoint's configuration says of the text model that is served, defaults filled in.

Read once, through transformers, by who deploys a model (``worker.models.config_reader``), and handed to every rank,
which then need not import transformers: that takes longer than to load a small model. It lives as long as the model.
"""

from dataclasses import dataclass
from types import SimpleNamespace


class TextConfig(SimpleNamespace):
    """The fields by their names in ``config.json``: numbers, strings, and lists and maps of them.

    A stand-in for transformers' own object of the same fields, which is what models are built from where a field is
    more than that.
    """


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """A configuration that was read and checked: the architecture that computes it, and what it says."""

    architecture: str
    text: TextConfig
