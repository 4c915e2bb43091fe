"""Every command of the documents is executed, or checked in the way that ``tests/docs/claims.py`` states."""

import itertools
import json
from dataclasses import replace

import openai
import pytest

from tests.docs.claims import DOCUMENTED_ADDRESS, Stage, claim_of
from tests.docs.documents import DOCUMENTS, REPOSITORY, SHELL, Block, Command, blocks, commands

# The first on a server waits for its start, which a busy machine may take minutes for.
pytestmark = pytest.mark.timeout(900)

COMMANDS = [command for document in DOCUMENTS for command in commands(document)]
EXAMPLES = {REPOSITORY / "docs" / name for name in ("adding-a-model.md", "adding-a-transport.md", "clients.md")}
"""Their Python has tests of its own."""
PYTHON = [
    block
    for document in DOCUMENTS
    if document not in EXAMPLES
    for block in blocks(document)
    if block.language == "python"
]


@pytest.mark.parametrize("command", [c for c in COMMANDS if not claim_of(c).on_server], ids=str)
def test_command(command: Command, stage: Stage) -> None:
    claim_of(command).check(stage, command)


@pytest.mark.replicas
@pytest.mark.parametrize("command", [c for c in COMMANDS if claim_of(c).on_server], ids=str)
def test_command_on_a_server(command: Command, stage: Stage, served_address: str) -> None:
    """Where the document shows an answer in JSON, the answer has its shape."""
    stage = replace(stage, address=served_address, environment={"key": "unused"})
    answer = claim_of(command).check(stage, command)
    assert answer
    if shown := shown_after(command):
        assert shape(json.loads(answer)) == shape(json.loads(shown.content)), answer


@pytest.mark.replicas
@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"{block.document.name}:{block.line}")
def test_python(block: Block, served_address: str) -> None:
    """Blocks after the first of a client use the client that it made."""
    client = openai.OpenAI(base_url=f"http://{served_address}/v1", api_key="unused")
    exec(
        compile(block.content.replace(DOCUMENTED_ADDRESS, served_address), str(block.document), "exec"),
        {"client": client},
    )


def shown_after(command: Command) -> Block | None:
    """The JSON that stands behind a command's block, if the command is its last."""
    found = blocks(command.document)
    for block, following in itertools.pairwise(found):
        if block.language in SHELL and [c for c in COMMANDS if within(c, block)][-1:] == [command]:
            return following if following.language == "json" else None
    return None


def within(command: Command, block: Block) -> bool:
    lines = range(block.line, block.line + block.content.count("\n"))
    return command.document == block.document and command.line in lines


def shape(value: object) -> object:
    """Names and types, and of a list its first element."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number"
    return type(value).__name__
