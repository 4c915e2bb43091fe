"""Python's cyclic garbage collector, in processes that import hundreds of modules and then serve for long.

Modules, models and their tables never become garbage, but the collector looks at all of them: again and again while
they are imported, and then, with every thread of the process waiting, whenever enough new objects have lived long.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def made_to_stay() -> Iterator[None]:
    """The collector rests during the block, and never again looks at what is alive at its end."""
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()
