"""``make api-reference`` reads every docstring and annotation without a warning."""

import subprocess
import sys

from tests.docs.documents import REPOSITORY


def test_it_is_made_without_a_warning() -> None:
    """What is installed is taken as it is."""
    installed = ("-o", ".venv/installed", "-o", ".venv/installed-dev", f"PY={sys.executable}")
    made = subprocess.run(
        ["make", *installed, "api-reference"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert "Warn" not in made.stderr
    pages = {path.relative_to(REPOSITORY / "build" / "api") for path in (REPOSITORY / "build" / "api").rglob("*.html")}
    assert {"cluster", "worker", "kv_transfer", "kernels"} <= {page.parts[0].removesuffix(".html") for page in pages}
