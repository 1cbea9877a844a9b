"""The manifests of deploy/kubernetes: valid by Kubernetes' schemas, complete, and what our daemons expect."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import kubernetes_validate
import pytest
import yaml
from leasehold_coordinator.server import config as coordinator_config
from leasehold_coordinator.server.health_reports import LIVENESS
from leasehold_worker.agent import config_file as worker_config
from leasehold_worker.agent.agent import FINISH_TIMEOUT_S, SETTLE_TIMEOUT_S
from leasehold_worker.local_api.health_port import SESSION

from tests.deploy.manifests import (
    BASE,
    FOLDER,
    KUSTOMIZATION,
    Object,
    find,
    kustomizations,
    named_files,
    objects,
    pod,
    resource_files,
    resources,
)
from tests.worker.unix_users import CAPABILITIES, as_user

VERSIONS: Final = ("1.31", "1.37")
"""The oldest supported release, and the newest one with schemas here."""

OVERLAYS: Final = sorted((FOLDER / "overlays").iterdir())
BUILDERS: Final = (["kustomize", "build"], ["kubectl", "kustomize"])
COORDINATOR, WORKER = ("StatefulSet", "coordinator"), ("DaemonSet", "worker")
PODS: Final = (COORDINATOR, WORKER)
LISTENERS: Final = ("listen", "worker_listen", "join_listen", "health_listen", "metrics_listen")
CLIENTS, WORKERS, ENROLMENT = "clients", "workers", "enrolment"


def refusal(manifest: Object, version: str = VERSIONS[-1]) -> str:
    """What is wrong with an object by the schema. Empty: nothing."""
    try:
        kubernetes_validate.validate(manifest.value, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return str(error.message)
    return ""


def patches(folder: Path) -> list[Object]:
    """The objects of a kustomization's patches, which lack required fields."""
    (kustomization,) = objects((folder / KUSTOMIZATION).read_text())
    names = [str(patch["path"].value) for patch in kustomization.get("patches")]
    return [one for name in names for one in objects((folder / name).read_text())]


def texts(value: Object) -> list[str]:
    return [str(one.value) for one in value]


def container_ports(manifest: Object) -> dict[str, int]:
    (container,) = pod(manifest)["containers"]
    return {str(port["name"].value): int(str(port["containerPort"].value)) for port in container["ports"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_is_valid(version: str) -> None:
    named = {path for folder in kustomizations() for path in resource_files(folder)}
    found = [one for path in named for one in objects(path.read_text())]
    assert len(found) > 10
    assert {one.name: refusal(one, version) for one in found} == {one.name: "" for one in found}


def test_an_unknown_field_is_refused() -> None:
    manifest = yaml.safe_load((BASE / "worker/service-account.yaml").read_text())
    manifest["automountServiceAccountTokens"] = False
    assert "automountServiceAccountTokens" in refusal(Object(manifest))


def test_each_file_is_named_by_a_kustomization() -> None:
    named = {path for folder in kustomizations() for path in named_files(folder)}
    assert {path for path in named if not path.exists()} == set()
    files = {path for path in FOLDER.rglob("*") if path.is_file() and path.name != KUSTOMIZATION}
    assert files - named == set()


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_each_patch_has_an_object(overlay: Path) -> None:
    assert {one.name for one in patches(overlay)} <= {one.name for one in resources(overlay)}


@pytest.mark.parametrize("folder", [BASE, *OVERLAYS], ids=lambda path: path.name)
def test_kustomize_builds_valid_objects(folder: Path) -> None:
    builder = next((words for words in BUILDERS if shutil.which(words[0])), None)
    if builder is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    done = subprocess.run([*builder, str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    built = objects(done.stdout)
    changed = [one for one in built if one.name[0] in ("ConfigMap", "DaemonSet", "StatefulSet", "Service")]
    assert {one.name: refusal(one) for one in changed} == {one.name: "" for one in changed}
    settings = {name for kind, name in (one.name for one in built) if kind == "ConfigMap"}
    daemons = [one for one in built if one.name in PODS]
    used = re.findall(r"[a-z]+-settings-[a-z0-9]{10}", str([pod(one).value for one in daemons]))
    assert sorted(used) == sorted(settings), "the pods have the settings of this build"
    assert len(settings) == len(daemons)
    assert done.stdout.count("runtimeClassName: nvidia") == (folder.name == "nvidia-runtime")


def test_the_worker_has_the_measured_capabilities_and_no_others() -> None:
    (container,) = pod(find(*WORKER))["containers"]
    capabilities = container["securityContext"]["capabilities"]
    assert texts(capabilities["drop"]) == ["ALL"]
    assert texts(capabilities["add"]) == [name.upper() for name in CAPABILITIES]
    assert texts(container["command"]) == [*as_user(10401, *CAPABILITIES), "leasehold", "worker"]


def test_only_the_worker_sees_the_host() -> None:
    coordinator, worker = pod(find(*COORDINATOR)), pod(find(*WORKER))
    assert worker["hostPID"].value is True
    assert "hostPID" not in str(coordinator.value)
    assert "hostPath" not in str(coordinator.value)
    for one in (coordinator, worker):
        assert not {"hostNetwork", "hostIPC", "privileged"} & set(re.findall(r"\w+", str(one.value)))
        assert one["automountServiceAccountToken"].value is False


@pytest.mark.parametrize("name", PODS, ids=lambda name: name[1])
def test_containers_can_gain_nothing_and_change_no_image(name: tuple[str, str]) -> None:
    spec = pod(find(*name))
    assert spec["securityContext"]["seccompProfile"]["type"].value == "RuntimeDefault"
    for container in [*spec["containers"], *spec.get("initContainers")]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"].value is False
        assert context["readOnlyRootFilesystem"].value is True
        assert texts(context["capabilities"]["drop"]) == ["ALL"]
        assert re.fullmatch(r"registry\.example\.com/[a-z-]+@sha256:0{64}", str(container["image"].value))


def test_the_coordinator_is_not_root() -> None:
    context = pod(find(*COORDINATOR))["securityContext"]
    assert context["runAsNonRoot"].value is True
    assert [context[key].value for key in ("runAsUser", "runAsGroup", "fsGroup")] == [10400] * 3
    labels = find("Namespace", "leasehold")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"].value == "restricted"


def test_workloads_end_with_their_pod_only_when_an_operator_says_so() -> None:
    worker = find(*WORKER)
    assert worker["spec"]["updateStrategy"]["type"].value == "OnDelete"
    grace_s = int(str(pod(worker)["terminationGracePeriodSeconds"].value))
    assert grace_s > FINISH_TIMEOUT_S + SETTLE_TIMEOUT_S


@pytest.mark.parametrize("folder", [BASE / "coordinator", FOLDER / "overlays/coordinator-only"])
def test_the_ports_are_those_of_the_coordinators_settings(folder: Path) -> None:
    config = coordinator_config.load_config(folder / "coordinator.toml")
    expected = [int(getattr(config, name).rpartition(":")[2]) for name in LISTENERS]
    found = container_ports(find(*COORDINATOR))
    assert [found[name] for name in (CLIENTS, WORKERS, ENROLMENT, "health", "metrics")] == expected
    assert config.server_names[-2] == "coordinator.leasehold.svc"
    mounts = [str(mount["mountPath"].value) for mount in _only(find(*COORDINATOR))["volumeMounts"]]
    assert str(Path(config.state_dir).parent) in mounts
    assert str(coordinator_config.SYSTEM_FILE.parent) in mounts
    services = [one for one in resources(folder) if one.name[0] == "Service"]
    published = {
        one.name[1]: {p["name"].value: p["port"].value for p in one["spec"]["ports"]} for one in services
    }
    every = {name: found[name] for name in (CLIENTS, WORKERS, ENROLMENT)}
    assert published.pop("coordinator-pods") == {CLIENTS: found[CLIENTS]}
    assert all(one == every for one in published.values())


def _only(manifest: Object) -> Object:
    (container,) = pod(manifest)["containers"]
    return container


def test_the_directories_are_those_of_the_workers_settings() -> None:
    config = worker_config.load_config(BASE / "worker/worker.toml")
    container = _only(find(*WORKER))
    mounts = {str(mount["mountPath"].value) for mount in container["volumeMounts"]}
    assert {str(config.state_dir), str(config.socket_path.parent)} <= mounts
    assert str(worker_config.SYSTEM_FILE.parent) in mounts
    addresses = {"health": config.health_listen, "metrics": config.metrics_listen}
    ports = {name: int(address.rpartition(":")[2]) for name, address in addresses.items()}
    assert container_ports(find(*WORKER)) == ports
    (directories,) = pod(find(*WORKER))["initContainers"]
    assert texts(directories["command"])[2:] == [str(config.state_dir), str(config.socket_path.parent)]
    (join_file,) = [text for text in texts(container["args"]) if text.startswith("/")]
    assert str(Path(join_file).parent) in mounts


@pytest.mark.parametrize(
    ("name", "services"),
    [(COORDINATOR, (LIVENESS, LIVENESS, "")), (WORKER, ("", "", SESSION))],
    ids=["coordinator", "worker"],
)
def test_probes_ask_for_services_that_the_daemon_knows(
    name: tuple[str, str], services: tuple[str, ...]
) -> None:
    container = _only(find(*name))
    probes = [container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]
    assert [probe["grpc"]["port"].value for probe in probes] == [7404] * 3
    assert tuple(str(probe["grpc"].get("service").value or "") for probe in probes) == services
    start, alive = (
        int(str(p["periodSeconds"].value)) * int(str(p["failureThreshold"].value)) for p in probes[:2]
    )
    assert (start, alive) == (300, 60), "as TimeoutStartSec and WatchdogSec of the units"


def test_each_pod_is_denied_everything_that_no_policy_permits() -> None:
    for folder in ("coordinator", "worker"):
        policies = [one for one in resources(BASE / folder) if one.name[0] == "NetworkPolicy"]
        (denial,) = [one["spec"].value for one in policies if one.name[1] == "default-deny"]
        assert denial == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
        for one in policies:
            assert "7404" not in str(one.value)
            assert "health" not in str(one.value)


@pytest.mark.parametrize(
    ("policy", "ports"), [("workers", [WORKERS, ENROLMENT]), ("clients", [CLIENTS, ENROLMENT])]
)
def test_callers_reach_their_own_ports_only(policy: str, ports: list[str]) -> None:
    (rule,) = find("NetworkPolicy", policy)["spec"]["ingress"]
    assert [port["port"].value for port in rule["ports"]] == ports


def test_selectors_select_the_pods() -> None:
    labels = {
        str(find(*name)["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"].value)
        for name in PODS
    }
    used = re.findall(r"app\.kubernetes\.io/name': '([a-z-]+)'", str([one.value for one in resources(BASE)]))
    assert set(used) == labels == {"leasehold-coordinator", "leasehold-worker"}
