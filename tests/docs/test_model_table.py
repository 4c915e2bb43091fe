"""docs/models.md has every architecture that can be served, with figures that the code gives."""

from tests.docs.documents import REPOSITORY
from tests.docs.model_table import COMMAND, DOCUMENT, TABLE, document_with, table
from worker.models.registry import ARCHITECTURES


def test_the_table_is_current() -> None:
    document = DOCUMENT.read_text()
    assert document == document_with(table(), document), f"{DOCUMENT} is out of date: run {COMMAND}"


def test_every_architecture_is_in_it() -> None:
    named = [name for release in TABLE for name in release.architectures]
    assert sorted(named) == sorted(ARCHITECTURES)
    assert f"[{len(ARCHITECTURES)} architectures]" in (REPOSITORY / "README.md").read_text()
    for release in TABLE:
        assert set(release.config["architectures"]) <= set(release.architectures)
