"""docs/kv-cache.md says what the code does."""

from tests.worker.kv_cache.documented_table import BEGIN, COMMAND, DOCUMENT, END, document_with, table


def test_the_documented_table_is_what_the_code_makes() -> None:
    document = DOCUMENT.read_text()
    assert document.count(BEGIN) == document.count(END) == 1, f"{DOCUMENT.name} has lost a marker of its table"
    renewed = document_with(table(), document)
    assert document == renewed, f"{DOCUMENT.name} is out of date; to renew it: {COMMAND}"
