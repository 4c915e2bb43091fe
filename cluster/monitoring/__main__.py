"""``python -m cluster.monitoring``: write the dashboard, the alerts and the page that follow from the definitions."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.monitoring.alerts import rule_groups
from cluster.monitoring.dashboard import dashboard
from cluster.monitoring.reference import reference

REPOSITORY = Path(__file__).parents[2]
DIRECTORY = REPOSITORY / "k8s" / "components" / "monitoring"
_MADE = "# Made by make monitoring from cluster/monitoring/; do not edit.\n"


def files() -> dict[Path, str]:
    """Return what is written where."""
    rules = rule_groups()
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "crosskv",
            "namespace": "crosskv",
            "labels": {"app.kubernetes.io/name": "crosskv"},
        },
        "spec": rules,
    }
    return {
        DIRECTORY / "dashboard.json": json.dumps(dashboard(), indent=1) + "\n",
        DIRECTORY / "alerts.yaml": _MADE + _yaml(rules),
        DIRECTORY / "prometheus-rule.yaml": _MADE + _yaml(rule),
        REPOSITORY / "docs" / "metrics.md": reference(),
    }


def _yaml(content: Mapping[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, width=120)


def main() -> None:
    """Write them into the repository."""
    for path, content in files().items():
        path.write_text(content)
        print(path)


if __name__ == "__main__":
    main()
