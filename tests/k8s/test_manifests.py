"""Every overlay as it would be applied: valid objects, and figures that agree with each other and with crosskv."""

import json
import re
import shlex
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import GangResourceRequest
from ray.scripts.scripts import start
from ray.serve.schema import ServeDeploySchema
from typer.main import get_command

import cluster.application
from cluster.cli import app
from cluster.config import ClusterConfig
from cluster.deployments import STOP_SECONDS, role_resource
from tests.cluster.test_placement import bundles, deployments
from tests.k8s.kubectl import K8S, REPOSITORY, render
from worker.config import Role

OVERLAYS = ("cpu-demo", "gpu-1p1d", "gpu-2p4d-tp")
RENDERED = (*(f"overlays/{name}" for name in OVERLAYS), "base", "load-test")
CUSTOM = {"ray.io/v1", "monitoring.coreos.com/v1"}
ENGINE_PORTS = (53000, 60999)


@cache
def documents(directory: str) -> tuple[dict, ...]:
    return tuple(render(K8S / directory))


def one(directory: str, kind: str, name: str | None = None) -> dict:
    (found,) = (
        d for d in documents(directory) if d["kind"] == kind and (name is None or d["metadata"]["name"] == name)
    )
    return found


def ray_cluster(directory: str) -> dict:
    if directory == "load-test":
        return one(directory, "RayCluster")["spec"]
    return one(directory, "RayService")["spec"]["rayClusterConfig"]


def groups(directory: str) -> dict[str, dict]:
    return {group["groupName"]: group for group in ray_cluster(directory)["workerGroupSpecs"]}


def container(group: dict) -> dict:
    (found,) = group["template"]["spec"]["containers"]
    return found


def arguments(directory: str) -> dict:
    (application,) = yaml.safe_load(one(directory, "RayService")["spec"]["serveConfigV2"])["applications"]
    return application["args"]


def constraint(package: str) -> str:
    return re.search(rf"^{package}==(.+)$", (REPOSITORY / "constraints.txt").read_text(), re.M)[1]


@pytest.mark.parametrize("directory", RENDERED)
def test_core_objects_are_valid(directory: str) -> None:
    for document in documents(directory):
        if document["apiVersion"] not in CUSTOM:
            kubernetes_validate.validate(document, "1.32", strict=True)


@pytest.mark.parametrize("directory", RENDERED)
def test_pods_are_valid(directory: str) -> None:
    """KubeRay makes pods of the templates, so they must be valid as pods."""
    spec = ray_cluster(directory)
    for template in (spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": "p"}}
        kubernetes_validate.validate(pod | {"spec": template["spec"]}, "1.32", strict=True)
        security = template["spec"]["securityContext"]
        assert security["runAsNonRoot"]
        assert security["runAsUser"] == 1000
        assert template["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("name", ["gcs-fault-tolerance", "monitoring"])
def test_components(name: str, tmp_path: Path) -> None:
    """As docs/kubernetes.md adds them to an overlay."""
    overlay = K8S / "overlays" / f"test-{tmp_path.name}"
    overlay.mkdir()
    try:
        content = {"resources": ["../cpu-demo"], "components": [f"../../components/{name}"]}
        (overlay / "kustomization.yaml").write_text(yaml.safe_dump(content))
        made = render(overlay)
    finally:
        (overlay / "kustomization.yaml").unlink()
        overlay.rmdir()
    for document in made:
        if document["apiVersion"] not in CUSTOM:
            kubernetes_validate.validate(document, "1.32", strict=True)
    kinds = {document["kind"]: document for document in made}
    if name == "monitoring":
        endpoint = kinds["PodMonitor"]["spec"]["podMetricsEndpoints"][0]
        ports = container(groups("overlays/cpu-demo")["front-end"])["ports"]
        assert endpoint["path"] == "/metrics"
        assert endpoint["port"] in {port["name"] for port in ports}
    else:
        redis = kinds["RayService"]["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
        service = next(d for d in made if d["kind"] == "Service" and d["metadata"]["name"] == "crosskv-redis")
        assert redis["redisAddress"] == f"crosskv-redis:{service['spec']['ports'][0]['port']}"


@pytest.mark.parametrize("name", OVERLAYS)
def test_ray_service_embeds_the_serve_config(name: str) -> None:
    own = K8S / "overlays" / name / "serve-config.yaml"
    file = own if own.exists() else K8S / "base" / "serve-config.yaml"
    assert one(f"overlays/{name}", "RayService")["spec"]["serveConfigV2"] == file.read_text()
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text())).applications
    assert application.name == cluster.application.APPLICATION
    assert application.import_path == "cluster.application:build"
    assert callable(cluster.application.build)


@pytest.mark.parametrize("name", OVERLAYS)
def test_settings_exist_and_fit_the_pods(name: str) -> None:
    given = arguments(f"overlays/{name}")
    config = ClusterConfig.model_validate(given)
    assert config.placement == "role"
    made = groups(f"overlays/{name}")
    assert made["front-end"]["replicas"] == 1
    assert made["prefill"]["replicas"] == config.prefill_replicas
    assert made["decode"]["replicas"] == config.decode_replicas
    scaled = ray_cluster(f"overlays/{name}").get("enableInTreeAutoscaling", False)
    for role in (Role.PREFILL, Role.DECODE):
        group, ranks = made[role.value], config.ranks_of(role)
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        if scaled:
            assert group["minReplicas"] == config.replicas[role]
            assert group["maxReplicas"] == config.most_replicas[role] > config.replicas[role]
        else:
            assert config.most_replicas == config.replicas, "nobody would add pods"
        assert float(group["rayStartParams"]["num-cpus"]) > config.threads * ranks
        assert float(container(group)["resources"]["limits"]["cpu"]) >= float(group["rayStartParams"]["num-cpus"])
        limits, gpus = container(group)["resources"]["limits"], group["rayStartParams"].get("num-gpus", "0")
        assert limits.get("nvidia.com/gpu", "0") == gpus == (str(ranks) if config.device.startswith("cuda") else "0")
        assert container(group)["image"].endswith(":cpu" if gpus == "0" else ":cuda")
        # NCCL's ranks of one pod need more shared memory than a container has.
        mounts = {mount["mountPath"] for mount in container(group)["volumeMounts"]}
        assert ("/dev/shm" in mounts) == (int(gpus) > 1)
    images = {container(group)["image"] for group in [*made.values(), ray_cluster(f"overlays/{name}")["headGroupSpec"]]}
    assert len(images) == 1, "Ray wants one version everywhere"
    front_end = container(made["front-end"])
    assert {"name": "http", "containerPort": config.port}.items() <= front_end["ports"][0].items()
    assert front_end["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    service = one(f"overlays/{name}", "Service", "crosskv")["spec"]
    assert service["ports"][0]["port"] == config.port
    assert service["selector"].items() <= made["front-end"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("directory", RENDERED)
def test_ray_is_started_with_options_that_it_has(directory: str) -> None:
    options = {option for parameter in start.params for option in parameter.opts}
    spec = ray_cluster(directory)
    assert spec["rayVersion"] == constraint("ray")
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert {f"--{name}" for name in group["rayStartParams"]} <= options
    for part, group in groups(directory).items():
        # KubeRay puts the text behind --resources= on a shell's command line.
        (resources,) = shlex.split(group["rayStartParams"]["resources"])
        assert json.loads(resources) == role_resource(part)


@pytest.mark.parametrize("directory", [d for d in RENDERED if d != "load-test"])
def test_network_policies(directory: str) -> None:
    """Ray's fixed ports are open between pods, engines' ports only to those who talk to engines, 8000 to everybody."""

    def allowed(policy: str) -> list[tuple[int, int]]:
        rules = one(directory, "NetworkPolicy", policy)["spec"]["ingress"]
        return [(p["port"], p.get("endPort", p["port"])) for rule in rules for p in rule["ports"]]

    ray_ports = allowed("crosskv-ray")
    spec = ray_cluster(directory)
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        parameters = group["rayStartParams"]
        for name, port in parameters.items():
            if name.endswith("-port"):
                assert any(low <= int(port) <= high for low, high in ray_ports), name
        assert (int(parameters["min-worker-port"]), int(parameters["max-worker-port"])) in ray_ports
        (sysctl,) = group["template"]["spec"]["securityContext"]["sysctls"]
        assert tuple(map(int, sysctl["value"].split())) == ENGINE_PORTS
    assert allowed("crosskv-engines") == [ENGINE_PORTS]
    assert not any(low <= ENGINE_PORTS[1] and high >= ENGINE_PORTS[0] for low, high in ray_ports)
    front_end = one(directory, "NetworkPolicy", "crosskv-front-end")["spec"]
    assert "from" not in front_end["ingress"][0]
    port = arguments(directory)["port"]
    assert front_end["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "front-end"
    assert allowed("crosskv-front-end") == [(port, port)]
    for policy in ("crosskv-ray", "crosskv-engines"):
        assert all("from" in rule for rule in one(directory, "NetworkPolicy", policy)["spec"]["ingress"])


def test_load_test_is_a_command_that_exists() -> None:
    job = one("load-test", "RayJob")["spec"]
    words = shlex.split(job["entrypoint"])
    assert words[:3] == ["python", "-m", "cluster.cli"]
    command, rest = get_command(app), words[3:]
    context = command.make_context("crosskv", rest[:0], resilient_parsing=True)
    while rest and hasattr(command, "commands"):
        command, rest = command.get_command(context, rest[0]), rest[1:]
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in rest if word.startswith("--")} <= options
    assert CliRunner().invoke(command, ["--help"]).exit_code == 0
    assert json.loads(job["entrypointResources"]) == role_resource("front-end")
    assert job["clusterSelector"]["ray.io/cluster"] == one("load-test", "RayCluster")["metadata"]["name"]
    assert job["submissionMode"] == "HTTPMode"
    assert {d["kind"] for d in documents("load-test")} == {"RayCluster", "RayJob"}


def test_image_runs_a_command_that_exists() -> None:
    text = (K8S / "image" / "Dockerfile").read_text()
    words = json.loads(re.search(r"^CMD (\[.+\])$", text, re.M)[1])
    assert words[:2] == ["crosskv", "serve"]
    options = {option for parameter in get_command(app).commands["serve"].params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options
    assert re.search(r"^USER 1000:1000$", text, re.M)
    copied = re.findall(r"^COPY (\w+) \1$", text, re.M)
    assert copied == ["cluster", "worker", "kv_transfer", "kernels"]


@pytest.mark.parametrize("directory", RENDERED)
def test_a_pod_that_is_deleted_waits_for_its_replicas(directory: str) -> None:
    """For as long as they may drain, and it is not killed before."""
    drain = ClusterConfig(**arguments(directory)).drain_seconds if directory != "load-test" else 30.0
    command = get_command(app).commands["drain-node"]
    for part, group in groups(directory).items():
        pod = group["template"]["spec"]
        (shell, _, script) = container(group)["lifecycle"]["preStop"]["exec"]["command"]
        assert shell == "/bin/sh"
        program, name, *rest = shlex.split(script.replace("$POD_IP", "10.0.0.1"))
        assert (program, name) == ("crosskv", "drain-node")
        given = command.make_context("drain-node", rest).params
        assert given["node_ip_address"] == "10.0.0.1"
        (variable,) = (each for each in container(group)["env"] if each["name"] == "POD_IP")
        assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        # Serve's patience with a replica that drains, and what a front end goes on answering for before.
        assert given["seconds"] >= drain + STOP_SECONDS + 3 + 10, part
        assert given["seconds"] <= pod["terminationGracePeriodSeconds"] - 10, part


@pytest.mark.parametrize("name", [name for name in OVERLAYS if name.startswith("gpu")])
def test_what_serve_has_no_place_for_gets_pods_of_its_role(name: str) -> None:
    """Ray's autoscaler, asked for the bundles that Serve waits for, launches as many pods as there may be, no other."""
    directory = f"overlays/{name}"
    config = ClusterConfig(**arguments(directory))
    cluster_object = {"metadata": {"name": "crosskv", "namespace": "crosskv"}, "spec": ray_cluster(directory)}
    kinds = AutoscalingConfig(_derive_autoscaling_config_from_ray_cr(cluster_object), skip_content_hash=True)
    made = deployments(config)
    wanted = [
        GangResourceRequest(requests=[ResourceRequestUtil.make(bundle) for bundle in bundles(made[role.value])])
        for role, most in config.most_replicas.items()
        for _ in range(most)
    ]
    reply = ResourceDemandScheduler().schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=kinds.get_node_type_configs(),
            max_num_nodes=kinds.get_max_num_nodes(),
            gang_resource_requests=wanted,
        )
    )
    assert not reply.infeasible_gang_resource_requests
    launched = {launch.instance_type: launch.count for launch in reply.to_launch}
    assert launched == {"front-end": 1} | {role.value: most for role, most in config.most_replicas.items()}


def mounted(template: dict) -> dict[str, str]:
    """Which Secret's keys lie in which directory of a pod."""
    spec = template["spec"]
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume}
    (only,) = spec["containers"]
    return {mount["mountPath"]: secrets[mount["name"]] for mount in only["volumeMounts"] if mount["name"] in secrets}


@pytest.mark.parametrize("directory", RENDERED)
def test_secrets_lie_where_settings_look_for_them_and_nowhere_else(directory: str) -> None:
    """Every pod knows the cluster token, front ends alone the API keys; the guide makes both Secrets."""
    spec = ray_cluster(directory)
    parts = {"head": spec["headGroupSpec"], **groups(directory)}
    guide = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    made = set(re.findall(r"create secret generic (\S+) --from-literal=(\w+)=", guide))
    for part, group in parts.items():
        variables = {each["name"]: each["value"] for each in container(group)["env"] if "value" in each}
        assert not {"CROSSKV_API_KEY", "CROSSKV_CLUSTER_TOKEN"} & variables.keys(), "seen by who may see pods"
        secrets = mounted(group["template"])
        files = {name: Path(variables[f"CROSSKV_{name.upper()}"]) for name in ("api_key_file", "cluster_token_file")}
        assert set(files) <= set(ClusterConfig.model_fields)
        token, keys = files["cluster_token_file"], files["api_key_file"]
        assert (secrets[str(token.parent)], token.name) in made
        assert (str(keys.parent) in secrets) == (part == "front-end")
        if part == "front-end":
            assert (secrets[str(keys.parent)], keys.name) in made
        assert set(secrets) <= {str(token.parent), str(keys.parent)}
