"""The image's recipe without a container engine: its Dockerfile's instructions, carried out in roots of a clean Debian.

``python -m tests.k8s.image_root DIRECTORY [MOUNT ...]`` builds the CPU image in DIRECTORY, starts its command with a
tiny model as the image's user, and gets an answer. It takes root, debootstrap, 5 GB and about ten minutes. The base is
Debian with Debian's Python instead of the Python image. pip's variables (``PIP_...``) and ``TORCH_CPU_INDEX`` count
inside too; a MOUNT is a directory of this machine that they name.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from cluster.ports import free_port
from tests.k8s.deployed.conftest import answers, complete, until
from tests.k8s.kubectl import K8S, REPOSITORY
from tests.tiny_checkpoints import write_tiny

# What the Python image has beyond a minimal Debian.
PYTHON = ("python3", "python3-venv", "ca-certificates")
PASSED_ON = re.compile(r"PIP_\w+|TORCH_CPU_INDEX|SSL_CERT_FILE|HTTPS?_PROXY|https?_proxy")


@dataclass
class Root:
    """A stage's file system, and what its instructions have said so far."""

    path: Path
    mounts: tuple[str, ...]
    arguments: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin"})
    directory: str = "/"
    user: str = "0:0"
    command: list[str] = field(default_factory=list)

    def inside(self, *command: str) -> list[str]:
        """``command`` in it, with processes and mounts of its own, which end with it."""
        outer = [f"mount --bind {mount} {self.path}{mount}" for mount in ("/dev", *self.mounts)]
        outer += [f"mount -t tmpfs tmpfs {self.path}/dev/shm", f"mount -t proc proc {self.path}/proc"]
        script = f"cd {self.directory} && exec {shlex.join(command)}"
        outer.append(f"exec chroot --userspec={self.user} {self.path} /bin/sh -c {shlex.quote(script)}")
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", "\n".join(outer)]

    def environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
        return {**own, "HOME": "/root" if self.user == "0:0" else "/home/crosskv", **self.variables}

    def run(self, script: str) -> None:
        environment = self.environment() | self.arguments
        subprocess.run(self.inside("/bin/sh", "-ec", script), env=environment, check=True)


def instructions() -> Iterator[tuple[str, str]]:
    """The Dockerfile's, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (K8S / "image" / "Dockerfile").read_text(), flags=re.M)
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if line.strip():
            name, rest = line.split(maxsplit=1)
            yield name, rest


def build(work: Path, mounts: tuple[str, ...], device: str) -> Root:
    """Carry out every instruction; returns the last stage."""
    base = work / "base"
    if not base.exists():
        packages = ",".join(PYTHON)
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", base], check=True)
    for mount in mounts:
        (base / mount.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for file in ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt"):
        shutil.copyfile(file, f"{base}{file}")
    roots: dict[str, Root] = {}
    root = Root(base, mounts)
    for name, rest in instructions():
        print(f"--- {name} {rest}", flush=True)
        match name:
            case "FROM":
                stage = rest.split(" AS ")[1] if " AS " in rest else "last"
                path = work / stage
                shutil.rmtree(path, ignore_errors=True)
                subprocess.run(["cp", "-a", base, path], check=True)
                roots[stage] = root = Root(path, mounts)
            case "ARG":
                variable, _, default = rest.partition("=")
                root.arguments[variable] = device if variable == "DEVICE" else default
            case "ENV":
                for word in shlex.split(rest):
                    variable, _, value = word.partition("=")
                    root.variables[variable] = value.replace("${PATH}", root.variables["PATH"])
            case "WORKDIR":
                (root.path / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
                root.directory = rest
            case "COPY":
                copy(rest.split(), root, roots)
            case "RUN":
                root.run(rest)
            case "USER":
                root.user = rest
            case "CMD":
                root.command = json.loads(rest)
            case "VOLUME" | "EXPOSE":
                pass
            case _:
                raise NotImplementedError(f"{name} {rest}")
    return root


def copy(words: list[str], root: Root, roots: dict[str, Root]) -> None:
    """From another stage, or from what the ignore file leaves of the repository."""
    target = root.path / os.path.join(root.directory, words[-1]).lstrip("/")
    if words[0].startswith("--from="):
        source = roots[words[0].removeprefix("--from=")].path / words[1].lstrip("/")
        subprocess.run(["cp", "-a", source, target], check=True)
        return
    let_in = re.findall(r"^!(\S+)$", (K8S / "image" / "Dockerfile.dockerignore").read_text(), re.M)
    for word in words[:-1]:
        assert word in let_in, f"{word} is not let into the build"
        if (REPOSITORY / word).is_dir():
            shutil.copytree(REPOSITORY / word, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / word, target)


def answer(root: Root) -> dict:
    """Start the image's command with a tiny model, ask it, and stop it as a container is stopped."""
    model = root.path / "models" / "tiny"
    if not model.exists():
        model.mkdir()
        write_tiny("llama", model)
        # The image's user is not who writes here.
        (model / "model.safetensors").chmod(0o644)
    port = free_port()
    root.variables |= {"CROSSKV_PORT": str(port), "CROSSKV_SERVED_MODEL_NAME": "tiny"}
    words = ["/models/tiny" if word == "smollm2" else word for word in root.command]
    process = subprocess.Popen(root.inside(*words), env=root.environment())
    try:
        url = f"http://127.0.0.1:{port}"
        until(300, "/health", lambda: process.poll() is not None or answers(f"{url}/health"))
        return complete(url)
    finally:
        # unshare keeps signals to itself; the command is the only child it has.
        for child in psutil.Process(process.pid).children():
            child.terminate()
        assert process.wait(60) == 0


if __name__ == "__main__":
    made = build(Path(sys.argv[1]).resolve(), tuple(sys.argv[2:]), "cpu")
    print(answer(made))
    print("the image's recipe works, and its command answers")
