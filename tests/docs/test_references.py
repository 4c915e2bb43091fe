"""What documents point at exists: pages and anchors, files of the repository, flags, make's targets."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ray.scripts.scripts import cli as ray_command
from typer.main import get_command

from cluster.cli import app
from cluster.config import SECRETS, ClusterConfig
from tests.docs.claims import options_of
from tests.docs.documents import DOCUMENTS, REPOSITORY, Span, anchors, code_spans, commands, links

ROOMS = tuple(path.name for path in REPOSITORY.iterdir() if path.is_dir() and not path.name.startswith((".", "build")))
# Of benchmarks, in sentences about their figures.
BENCHMARK_FLAGS = {"--seconds", "--requests"}
NAMED_IN_EXAMPLES = {"worker/models/smollm3.py", "k8s/overlays/mine/kustomization.yaml"}


def every(spans: Callable[[Path], Iterable[Span]]) -> list[Span]:
    return [span for document in DOCUMENTS for span in spans(document)]


def place(span: Span) -> str:
    return f"{span.document.relative_to(REPOSITORY)}:{span.line}: {span.text}"


def test_links_lead_somewhere() -> None:
    """To a file of the repository, and to a heading of a document. Other sites are not asked."""
    lost = []
    for span in every(links):
        target, _, anchor = span.text.partition("#")
        if "://" in target:
            continue
        file = (span.document.parent / target).resolve() if target else span.document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            lost.append(place(span))
    assert not lost


def test_files_exist() -> None:
    """``worker/models/``, ``cluster/router.py`` and others that stand in the text, without a placeholder in them."""
    pattern = re.compile(rf"(?:{'|'.join(ROOMS)})/[\w./-]*")
    lost = [
        place(span)
        for span in every(code_spans)
        if pattern.fullmatch(span.text) and span.text not in NAMED_IN_EXAMPLES and not (REPOSITORY / span.text).exists()
    ]
    assert not lost


def test_flags_exist() -> None:
    """In the text, as in ``--kv-sharing`` or ``crosskv inspect MODEL --request-tokens 8192``."""
    known = {"--help", *options(get_command(app)), *options(ray_command), *BENCHMARK_FLAGS, *flags_of_others()}
    lost = [
        f"{place(span)} has {flag}"
        for span in every(code_spans)
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", span.text)
        if flag not in known and not foreign(span)
    ]
    assert not lost


def flags_of_others() -> set[str]:
    """Those of other programs' commands that documents show."""
    shown = [command for document in DOCUMENTS for command in commands(document)]
    return {flag for command in shown if "crosskv" not in command.words[0] for flag in options_of(command.words)}


def foreign(span: Span) -> bool:
    """Another program's command."""
    return (
        re.match(r"(kubectl|helm|docker|pytest|make|python|vllm|lm_eval|ray|serve|promtool)\b", span.text) is not None
    )


def test_variables_exist() -> None:
    own = {f"CROSSKV_{name.upper()}" for name in ClusterConfig.model_fields} | {"CROSSKV_CACHE", "CROSSKV_DEBUG"}
    own |= set(re.findall(r"\bCROSSKV_\w+", (REPOSITORY / "Makefile").read_text()))
    assert {f"CROSSKV_{name.upper()}" for name in SECRETS} <= own
    lost = [
        place(span) for span in every(code_spans) for name in re.findall(r"\bCROSSKV_\w+", span.text) if name not in own
    ]
    assert not lost


def test_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    lost = [
        place(span)
        for span in every(code_spans)
        if (target := re.match(r"(?:sudo )?make ([\w-]+)", span.text))
        and not re.search(rf"^{target[1]}:", makefile, re.M)
    ]
    assert not lost


def options(command: Any) -> Iterator[str]:
    """Every option of a command and of those in it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in command.commands.values() if hasattr(command, "commands") else ():
        yield from options(inner)
