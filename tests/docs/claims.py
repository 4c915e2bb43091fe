"""Who checks which of the documents' commands, and how. A command that nothing here claims fails its test.

What can be executed is: on a server that ``crosskv serve smollm2`` started, with the documents' port replaced by its
own, and a tiny model behind the documents' name. What would change a Kubernetes cluster, the machine, or the network is
compared with the files, options and names that it mentions.
"""

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ray.scripts.scripts import cli as ray_command
from ray.serve.schema import ServeDeploySchema
from ray.serve.scripts import cli as serve_command
from typer.main import get_command

from cluster.cli import app
from tests.cluster.command_line import Run
from tests.docs.documents import DOCUMENTS, REPOSITORY, Command, commands, figures_after
from tests.k8s.kubectl import kubectl

DOCUMENTED_ADDRESS = "127.0.0.1:8000"
BIN = Path(sys.executable).parent


class ReadyToStart(Exception):
    """A command has checked all that it can, and would start processes now."""


@dataclass
class Stage:
    """Where commands run: a directory with the files that documents name. ``address`` is the server's, if there is one.

    ``crosskv`` runs the command line in this process.
    """

    directory: Path
    crosskv: Run
    pytest_options: Mapping[str, str]
    address: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def shell(self, text: str, seconds: float = 60.0) -> str:
        """Run a command in bash; returns its output."""
        finished = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.directory,
            env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"} | self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert finished.returncode == 0, f"{text}\n{finished.stdout}{finished.stderr}"
        return finished.stdout

    def here(self, words: Iterable[str]) -> str:
        """Run ``crosskv`` with these words, which must succeed; returns its output."""
        code, out, err = self.crosskv(*words)
        assert code == 0, out + err
        return out


Check = Callable[[Stage, Command], str | None]


@dataclass(frozen=True)
class Claim:
    """``pattern`` is how a command begins, or what it contains. ``on_server``: ``check`` needs one."""

    pattern: str
    check: Check
    on_server: bool = False

    def holds_for(self, command: Command) -> bool:
        return re.match(self.pattern, command.text.strip(), re.DOTALL) is not None


def claim_of(command: Command) -> Claim:
    """The first that fits."""
    found = next((claim for claim in CLAIMS if claim.holds_for(command)), None)
    assert found is not None, f"{command}: no claim in tests/docs/claims.py says how this command is checked"
    return found


# --- executed ---------------------------------------------------------------------------------------------------------


def ask_server(stage: Stage, command: Command) -> str:
    """``crosskv`` as a client, in this process. Loads are small ones, of tokens that a tiny model has."""
    words = command.words[1:]
    if words[0] == "bench":
        for name, value in (("--num-prompts", "2"), ("--output-len", "4"), ("--request-rate", "50")):
            if name in words:
                words[words.index(name) + 1] = value
        words += ["--vocabulary", "512"]
    return stage.here([*words, "--base-url", f"http://{stage.address}"])


def trace_a_request(stage: Stage, command: Command) -> str:
    """``crosskv trace``, of a request that is made for it, which is also the last."""
    body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 4}
    answer = httpx.post(f"http://{stage.address}/v1/completions", json=body, timeout=60).json()
    words = [answer["id"] if re.match(r"(chat)?cmpl-", word) else word for word in command.words[1:]]
    said = stage.here([*words, "--base-url", f"http://{stage.address}"])
    assert answer["id"] in said
    return said


def watch_server(stage: Stage, command: Command) -> str:
    """A command that goes on until it is interrupted: until it has said something."""
    text = f"{command.text.split('#')[0]} --base-url http://{stage.address}"
    return stage.shell(f"timeout --signal INT --preserve-status 4 {text} || test $? = 130")


def run_against_server(stage: Stage, command: Command) -> str:
    """Any other client, in bash."""
    return stage.shell(command.text.replace(DOCUMENTED_ADDRESS, stage.address))


def run_in_shell(stage: Stage, command: Command) -> str:
    return stage.shell(command.text)


def run_crosskv(stage: Stage, command: Command) -> str:
    """Commands that need no server. Figures of a table that follows are in what they say."""
    said = stage.here(_with_tiny_model(command.words[1:], stage))
    for figure in figures_after(command):
        assert figure in said, f"{figure} stands below the command, which says\n{said}"
    return said


def get_ready(stage: Stage, command: Command) -> None:
    """``crosskv serve`` and others that start processes, up to where they would."""
    words = command.words
    assignments = [word for word in words[: words.index("crosskv")] if "=" in word]
    with pytest.MonkeyPatch.context() as patch:
        for assignment in assignments:
            patch.setenv(*assignment.split("=", 1))
        try:
            outcome = stage.crosskv(*_with_tiny_model(words[words.index("crosskv") + 1 :], stage))
        except ReadyToStart:
            return
    raise AssertionError(f"{command} started nothing: {outcome}")


def _with_tiny_model(words: list[str], stage: Stage) -> list[str]:
    """Where a model would be downloaded, the tiny one."""
    tiny = str(stage.directory / "smollm2")
    return [tiny if word == "smollm2" or re.fullmatch(r"[A-Z]\w+/[A-Z][\w.-]+", word) else word for word in words]


# --- compared with what they name -------------------------------------------------------------------------------------


def parse_crosskv(stage: Stage, command: Command) -> None:
    """Its options and arguments exist."""
    del stage
    walk(get_command(app), command.words[command.words.index("crosskv") + 1 :])


def parse_ray(stage: Stage, command: Command) -> None:
    """Options of Ray's command exist; what a job runs is a command like any other."""
    words = command.words
    if "--" in words:
        job = words[words.index("--") + 1 :]
        words = words[: words.index("--") + 1] + job
        require_claim(stage, command, shlex.join(job))
    walk(ray_command, words[1:])


def parse_serve(stage: Stage, command: Command) -> None:
    """Options of Serve's command exist, and its configuration is one."""
    del stage
    walk(serve_command, command.words[1:])
    for word in command.words:
        if word.endswith(".yaml"):
            ServeDeploySchema.model_validate(yaml.safe_load((REPOSITORY / word).read_text()))


def walk(command: Any, words: list[str]) -> None:
    """Parse a command line of click, Ray's or Typer's, and run nothing."""
    context = command.make_context(command.name or "", list(words))
    if hasattr(command, "commands"):
        inner, *rest = [*context._protected_args, *context.args]
        assert inner in command.commands, f"there is no command {inner}"
        walk(command.commands[inner], rest)


def know_target(stage: Stage, command: Command) -> None:
    """make knows what it would do."""
    del stage
    words = [word for word in command.words if word != "sudo"]
    subprocess.run(["make", "-n", *words[1:]], cwd=REPOSITORY, check=True, capture_output=True)


def find_module(stage: Stage, command: Command) -> None:
    """``python -m``: the module exists, and so do its options."""
    words = command.words[command.words.index("-m") + 1 :]
    if words[0] == "cluster.cli":
        require_claim(stage, command, shlex.join(["crosskv", *words[1:]]))
        return
    found = find_spec(words[0])
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).read_text()
    for option in options_of(words[1:]):
        assert option in source, f"{words[0]} has no {option}"


def find_tests(stage: Stage, command: Command) -> None:
    """pytest: the tests exist, and so do its options."""
    for word in command.words[1:]:
        if word.startswith("tests"):
            assert (REPOSITORY / word).exists(), word
    for option in options_of(command.words):
        assert option in stage.pytest_options, option


def find_client(stage: Stage, command: Command) -> None:
    """Clients are in environments of their own, where ``make test-clients`` runs them: that it has this one."""
    del stage
    tests = [path.read_text() for path in (REPOSITORY / "tests" / "clients").glob("*.py")]
    assert any(command.words[0] in test for test in tests), f"no test in tests/clients runs {command.words[0]}"


def find_files(stage: Stage, command: Command) -> None:
    """Files and directories of the repository that are named exist."""
    del stage
    named = [word for word in command.words if re.match(r"(\.venv|k8s|docs|tests|benchmarks)/", word)]
    assert named, "names no file of the repository"
    for word in named:
        assert (REPOSITORY / word).exists(), word


def build_image(stage: Stage, command: Command) -> None:
    """docker build: its file, and the arguments that the file takes."""
    words = command.words
    recipe = (REPOSITORY / words[words.index("-f") + 1]).read_text()
    for flag, argument in itertools.pairwise(words):
        if flag == "--build-arg":
            assert f"ARG {argument.split('=')[0]}" in recipe, argument
    find_files(stage, command)


def ask_kubectl(stage: Stage, command: Command) -> None:
    """kubectl: what it would apply can be rendered, its options exist, and so do the objects that it names."""
    del stage
    words = re.sub(r"^\w+=\$\((.*)\)$", r"\1", command.text, flags=re.DOTALL)
    arguments = shlex.split(words.split(" | ")[0], comments=True)
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]
    if "-n" in arguments:
        at = arguments.index("-n")
        del arguments[at : at + 2]
    verb = arguments[1 : 4 if arguments[1:3] == ["create", "secret"] else 3 if arguments[1] == "create" else 2]
    help_text = kubectl_help(tuple(verb))
    for option in options_of(arguments):
        assert re.search(rf"^\s+(-\w, )?{option}[=:]", help_text, re.M), f"kubectl {' '.join(verb)} has no {option}"
    for directory in (word for word in arguments if word.startswith("k8s/")):
        subprocess.run([kubectl(), "kustomize", str(REPOSITORY / directory)], check=True, capture_output=True)
    known = object_names()
    for word in arguments[1:]:
        for name in re.findall(r"\bcrosskv(?:-\w+)*", word) if not word.startswith("k8s/") else ():
            assert name in known, f"no manifest and no command here has {name}"


@cache
def kubectl_help(verb: tuple[str, ...]) -> str:
    return "".join(
        subprocess.run([kubectl(), *words], capture_output=True, text=True, check=True).stdout
        for words in ((*verb, "--help"), ("options",))
    )


@cache
def object_names() -> frozenset[str]:
    """What manifests and the documents' own ``kubectl create`` call themselves crosskv."""
    texts = [path.read_text() for path in (REPOSITORY / "k8s").rglob("*.yaml")]
    texts += [
        c.text for document in DOCUMENTS for c in commands(document) if "kubectl" in c.text and "create" in c.text
    ]
    return frozenset(re.findall(r"\bcrosskv(?:-\w+)*", "\n".join(texts)))


def parse_words(stage: Stage, command: Command) -> None:
    """Somebody else's command about somebody else's things: only that it is a command."""
    del stage
    subprocess.run(["bash", "-n", "-c", command.text], check=True, capture_output=True)


def require_claim(stage: Stage, command: Command, text: str) -> None:
    """Check a command that stands inside another."""
    inner = Command(command.document, command.line, text)
    claim = claim_of(inner)
    assert not claim.on_server
    claim.check(stage, inner)


def options_of(words: Iterable[str]) -> list[str]:
    """Long options, without their values."""
    return [word.split("=")[0] for word in words if re.match(r"--\w", word)]


ASSIGNMENTS = r"(?:\w+=\S+ )*"
CLAIMS = (
    Claim(r"crosskv status .*--watch", watch_server, on_server=True),
    Claim(r"crosskv trace\b", trace_a_request, on_server=True),
    Claim(r"crosskv (chat|status|bench serve)\b", ask_server, on_server=True),
    Claim(r"curl\b.*127\.0\.0\.1:8000", run_against_server, on_server=True),
    Claim(r"crosskv (inspect|models)\b", run_crosskv),
    Claim(rf"{ASSIGNMENTS}crosskv (serve|demo|bench transfer)\b", get_ready),
    # It would download.
    Claim(r"crosskv fetch\b", parse_crosskv),
    Claim(r"(umask|echo|openssl)\b", run_in_shell),
    Claim(r"(vllm|lm_eval|guidellm|aiperf)\b", find_client),
    Claim(r"(sudo )?make\b", know_target),
    Claim(r"python -m\b", find_module),
    Claim(r"pytest\b", find_tests),
    Claim(r"source \.venv|cd k8s/.*kustomize edit set image", find_files),
    Claim(r"docker build\b", build_image),
    Claim(r"(\w+=\$\()?kubectl\b", ask_kubectl),
    Claim(r"ray (start|stop|job)\b", parse_ray),
    Claim(r"serve (deploy|status|shutdown)\b", parse_serve),
    Claim(r"(helm|kind|git|kill|cd|export)\b", parse_words),
)
