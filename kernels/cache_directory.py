"""Where a machine keeps what it needs to make or fetch only once: compiled kernels here, models above."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """``$CROSSKV_CACHE``, else ``$XDG_CACHE_HOME/crosskv``, else ``~/.cache/crosskv``."""
    if own := os.environ.get("CROSSKV_CACHE"):
        return Path(own).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "crosskv"
    return Path.home() / ".cache" / "crosskv"
