"""The Helm chart: every object it renders is valid Kubernetes, and every configuration in it is valid Isthmus."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import helm_python
import kubernetes_validate
import pytest
import yaml

from isthmus_core.config import parse_config

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "isthmus"
VERSION = "1.30.0"  # the oldest with a schema here that is still in wide use
Object = dict[str, Any]

VARIANTS: dict[str, Object] = {
    "defaults": {},
    "everything": {
        "image": {"tag": "1.2.3", "pullSecrets": [{"name": "registry"}]},
        "model": {"claim": "models", "path": "/models/llama", "name": "llama"},
        "config": {"engine": {"device": "cuda"}, "router": {"schedule": "generation_first"}},
        "workers": {
            "context": {"replicas": 4, "config": {"engine": {"max_batch_tokens": 8192}}},
            "both": {
                "role": "context_and_generation",
                "replicas": 2,
                "shm": "2Gi",
                "resources": {"limits": {"nvidia.com/gpu": 1}},
            },
        },
        "dataPlane": {"devices": "mlx5_0:1", "env": {"UCX_TLS": "rc,cuda"}},
        "tls": {"secret": "isthmus-tls"},
        "router": {"autoscaling": {"enabled": True}, "nodeSelector": {"pool": "cpu"}, "keysSecret": "isthmus-keys"},
        "telemetry": {"otlpEndpoint": "http://otel:4317", "serviceMonitor": {"enabled": True}},
        "networkPolicy": {"clients": [{"namespaceSelector": {}}]},
        "podAnnotations": {"team": "serving"},
    },
    "spread": {"workers": {"context": {"nodes": 2, "followers": ["engine", "join", "$(LWS_LEADER_ADDRESS)"]}}},
    "bare": {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
}


def render(values: Object) -> list[Object]:
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(values=values, name="demo", namespace="serving")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [cast("Object", one) for text in texts for one in yaml.safe_load_all(text) if one is not None]


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def containers(objects: list[Object]) -> list[Object]:
    found: list[Object] = []
    for one in objects:
        for template in templates(one):
            pod = template["spec"]
            found += [*pod["containers"], *pod.get("initContainers", [])]
    return found


def templates(one: Object) -> list[Object]:
    """Pod templates of an object."""
    if one["kind"] == "LeaderWorkerSet":
        group = one["spec"]["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]
    return [one["spec"]["template"]] if one["kind"] in ("Deployment", "StatefulSet") else []


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_object_is_valid_strictly(variant: str):
    objects = render(VARIANTS[variant])
    for one in objects:
        if one["kind"] in ("ServiceMonitor", "LeaderWorkerSet"):
            continue  # custom resources: they have no schema here
        kubernetes_validate.validate(one, VERSION, strict=True)
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len(set(names))


def test_helm_lint_is_content():
    report = helm_python.lint(str(CHART), {}, strict=True)
    assert not report["errors"], report


@pytest.mark.parametrize("variant", VARIANTS)
def test_configurations_are_those_of_the_schema(variant: str):
    objects = render(VARIANTS[variant])
    (config,) = of_kind(objects, "ConfigMap").values()
    parsed = {name: parse_config(yaml.safe_load(text)) for name, text in config["data"].items()}
    assert parsed["router.yaml"].router.coordinator == "demo-coordinator:50050"
    assert parsed["context.yaml"].worker.role == "context"
    assert parsed["generation.yaml"].worker.role == "generation"
    if variant == "everything":
        assert parsed["both.yaml"].worker.role == "context_and_generation"
        assert parsed["context.yaml"].engine.max_batch_tokens == 8192
        assert parsed["generation.yaml"].engine.max_batch_tokens != 8192, "a pool's settings are its own"
        assert all(one.engine.device == "cuda" and one.tls.enabled for one in parsed.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_are_least_privileged_and_stop_in_peace(variant: str):
    objects = render(VARIANTS[variant])
    for one in containers(objects):
        security = one["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert security["runAsNonRoot"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"]["drop"] == ["ALL"]
    (config,) = of_kind(objects, "ConfigMap").values()
    drain = max(parse_config(yaml.safe_load(text)).worker.drain_s for text in config["data"].values())
    for one in objects:
        assert all(pod["spec"]["terminationGracePeriodSeconds"] > drain for pod in templates(one))


@pytest.mark.parametrize("variant", ["everything", "spread"])
def test_selectors_find_their_pods(variant: str):
    objects = render(VARIANTS[variant])
    pods = [template["metadata"]["labels"] for one in objects for template in templates(one)]
    selectors = [one["spec"]["selector"] for one in of_kind(objects, "Service").values()]
    selectors += [one["spec"]["selector"]["matchLabels"] for one in of_kind(objects, "PodDisruptionBudget").values()]
    selectors += [one["spec"]["podSelector"]["matchLabels"] for one in of_kind(objects, "NetworkPolicy").values()]
    for selector in selectors:
        assert [labels for labels in pods if selector.items() <= labels.items()], selector


def test_the_data_plane_is_open_between_workers_only():
    objects = render({})
    rules = of_kind(objects, "NetworkPolicy")["demo-workers"]["spec"]["ingress"]
    (data,) = [rule for rule in rules if rule["ports"][0]["port"] == 47000]
    assert data["ports"][0]["endPort"] == 47999
    assert data["from"][0]["podSelector"]["matchLabels"]["isthmus/worker"] == "true"
    for one in of_kind(objects, "StatefulSet").values():
        environment = {
            entry["name"]: entry.get("value") for entry in one["spec"]["template"]["spec"]["containers"][0]["env"]
        }
        assert environment["UCX_TCP_PORT_RANGE"] == "47000-47999"


def test_probes_use_certificates_when_the_hops_do():
    plain, secure = (containers(render(values)) for values in ({}, {"tls": {"secret": "s"}}))
    assert all("grpc" in one["readinessProbe"] for one in plain if "readinessProbe" in one)
    probed = [one for one in secure if "readinessProbe" in one]
    assert all("isthmus_core.healthcheck" in one["readinessProbe"]["exec"]["command"] for one in probed)
    assert all(
        {"name": "tls", "mountPath": "/etc/isthmus/tls", "readOnly": True} in one["volumeMounts"] for one in probed
    )


def test_an_instance_of_several_nodes_is_a_leader_worker_set():
    alike, spread = render({}), render(VARIANTS["spread"])
    (group,) = of_kind(spread, "LeaderWorkerSet").values()
    assert group["metadata"]["name"] == "demo-context"
    assert set(of_kind(spread, "StatefulSet")) == {"demo-generation"}
    assert group["spec"]["replicas"] == 1
    template = group["spec"]["leaderWorkerTemplate"]
    assert (template["size"], template["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    # The leader is what the only pod of an instance is otherwise; the others run what they are told, with the same
    # memory, network and rights, and serve nothing.
    stateful = of_kind(alike, "StatefulSet")["demo-context"]["spec"]["template"]
    assert template["leaderTemplate"] == stateful
    follower = template["workerTemplate"]
    (container,), (leader,) = follower["spec"]["containers"], stateful["spec"]["containers"]
    assert container["command"] == ["engine", "join", "$(LWS_LEADER_ADDRESS)"]
    assert not {"args", "ports", "readinessProbe", "startupProbe"} & set(container)
    assert all(
        container[key] == leader[key] for key in ("image", "env", "resources", "securityContext", "volumeMounts")
    )
    assert follower["metadata"] == stateful["metadata"]
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "follower"}, "spec": follower["spec"]},
        VERSION,
        strict=True,
    )


def test_followers_without_a_command_are_refused():
    with pytest.raises(Exception, match=r"set workers\.context\.followers"):
        render({"workers": {"context": {"nodes": 2}}})


def test_api_keys_reach_the_router_only_and_follow_their_secret():
    objects = render({"router": {"keysSecret": "client-keys"}})
    (config,) = of_kind(objects, "ConfigMap").values()
    parsed = parse_config(yaml.safe_load(config["data"]["router.yaml"]))
    assert str(parsed.router.clients.keys_file) == "/etc/isthmus/keys/keys.yaml"
    holders = [
        one["metadata"]["name"]
        for one in objects
        for template in templates(one)
        if any(volume.get("secret") == {"secretName": "client-keys"} for volume in template["spec"]["volumes"])
    ]
    assert holders == ["demo-router"]
    (container,) = of_kind(objects, "Deployment")["demo-router"]["spec"]["template"]["spec"]["containers"]
    assert {"name": "keys", "mountPath": "/etc/isthmus/keys", "readOnly": True} in container["volumeMounts"]
