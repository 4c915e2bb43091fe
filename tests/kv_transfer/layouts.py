"""Small layouts, and strategies for them."""

from hypothesis import strategies as st

from kv_transfer.layout import CacheLayout, OwnerLayer


def make_layout(*bytes_per_token: int) -> CacheLayout:
    """Owners of the given sizes, and two layers that share."""
    owners = tuple(OwnerLayer(f"layers.{i}", 2, size) for i, size in enumerate(bytes_per_token))
    return CacheLayout("fingerprint", "bfloat16", owners, sharing_digest="digest", sharing_layers=2)


LAYOUT = make_layout(8, 8, 8)

layouts = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(lambda sizes: make_layout(*sizes))


@st.composite
def token_ranges(draw: st.DrawFn) -> tuple[int, int]:
    """Tokens ``[begin, end)``, at least one."""
    begin = draw(st.integers(0, 30))
    return begin, begin + draw(st.integers(1, 30))
