"""docs/user-guide.md has every command and setting, as the command line has them."""

from cluster.config import ClusterConfig
from tests.docs.option_tables import COMMAND, COMMANDS, DOCUMENT, GROUPS, document_with_tables, fields_of, groups_in


def test_tables_are_current() -> None:
    document = DOCUMENT.read_text()
    assert document == document_with_tables(document), f"{DOCUMENT} is not what the settings are: run {COMMAND}"


def test_every_setting_is_in_one_table() -> None:
    groups = groups_in(DOCUMENT.read_text())
    assert sorted(groups) == sorted([*GROUPS, COMMANDS])
    shown = [name for group in GROUPS for name in fields_of(group)]
    assert sorted(shown) == sorted(ClusterConfig.model_fields)
