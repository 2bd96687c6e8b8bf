"""Image, compose file, Prometheus and Grafana: they refer to what exists, and show metrics that exist."""

import json
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from server.app import AppSettings, create_app
from server.config import OPTIONS, load_config
from server.metrics import Metrics
from server.options import variable_of
from tests.fakes import FakeEngine
from tests.operators import need_operators
from tests.server.running import running_server

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "outrider.json"
BIN = Path(sys.executable).parent


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    """Every PromQL expression of the dashboard and the rules."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    found += [
        variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable
    ]
    for group in load_yaml(DOCKER / "prometheus" / "rules.yaml")["groups"]:
        found += [rule["expr"] for rule in group["rules"]]
    return found


def fresh_series() -> dict[str, set[str]]:
    """The label names of each series name on /metrics of a fresh server."""
    metrics = Metrics(model_name="m", method="ngram", max_draft_tokens=4)
    series: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            series.setdefault(sample.name, set()).update(sample.labels)
    return series


def test_every_metric_on_the_dashboard_and_in_the_rules_exists() -> None:
    series = fresh_series()
    used = set()
    for expression in expressions():
        names = re.findall(r"\b(?:outrider|process)_\w+", expression)
        assert names or "up{" in expression, expression
        used.update(names)
    assert used - series.keys() == set()
    assert len(used) > 20


def test_every_label_in_a_selector_exists() -> None:
    series = fresh_series()
    for expression in expressions():
        for name, selector in re.findall(r"\b((?:outrider|process)_\w+)\{([^}]*)\}", expression):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert labels - series[name] <= {"instance", "job"}, expression


def test_the_dashboard_shows_what_speculation_is_about() -> None:
    titles = {panel["title"] for panel in panels()}
    assert {
        "Acceptance rate",
        "Tokens per forward",
        "Accepted length",
        "Time to first token",
        "Inter-token latency",
        "Tokens generated",
        "Requests running and waiting",
        "Time in the queue",
        "KV cache in use",
        "Preemptions",
        "Where a step's time goes",
    } <= titles
    split = next(panel for panel in panels() if panel["title"] == "Where a step's time goes")
    assert [target["legendFormat"] for target in split["targets"]] == ["{{part}}"]
    assert "sum by (part)" in split["targets"][0]["expr"]


def test_panels_do_not_overlap_and_explain_themselves() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels():
        place = panel["gridPos"]
        assert panel["description"].endswith(".")
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, (panel["title"], taken.get((x, y)))
                taken[x, y] = panel["title"]
    ids = [panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    assert len(ids) == len(set(ids))


def test_grafana_finds_its_dashboard_and_its_data_source() -> None:
    compose = load_yaml(DOCKER / "compose.yaml")
    folder = load_yaml(DOCKER / "grafana/provisioning/dashboards/outrider.yaml")["providers"][0]["options"][
        "path"
    ]
    assert f"./grafana/dashboards:{folder}:ro" in compose["services"]["grafana"]["volumes"]
    source = load_yaml(DOCKER / "grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose["services"]


def test_compose_refers_to_files_services_and_volumes_that_exist() -> None:
    compose = load_yaml(DOCKER / "compose.yaml")
    services = compose["services"]
    for name, service in services.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            known = (DOCKER / source).exists() if source.startswith(".") else source in compose["volumes"]
            assert known, (name, volume)
        assert set(service.get("depends_on", ())) <= services.keys()
        if "build" in service:
            assert (DOCKER / service["build"]["context"] / "Dockerfile").is_file()


def test_both_replicas_are_balanced_and_scraped() -> None:
    compose = load_yaml(DOCKER / "compose.yaml")
    replicas = {f"{name}:8000" for name, service in compose["services"].items() if "build" in service}
    assert len(replicas) == 2
    nginx = (DOCKER / "nginx" / "nginx.conf").read_text()
    assert set(re.findall(r"server (\S+:8000)", nginx)) == replicas
    assert "proxy_buffering off;" in nginx
    scraped = load_yaml(DOCKER / "prometheus" / "prometheus.yaml")["scrape_configs"][0]
    assert set(scraped["static_configs"][0]["targets"]) == replicas


def test_the_settings_that_image_and_compose_make_are_valid() -> None:
    image = dict(re.findall(r"(OUTRIDER_\w+)=(\S+)", (ROOT / "Dockerfile").read_text()))
    assert image["OUTRIDER_HOST"] == "0.0.0.0"
    service = load_yaml(DOCKER / "compose.yaml")["services"]["outrider-1"]
    # As compose fills them in where nothing is set.
    replica = {
        name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for name, value in service["environment"].items()
    }
    assert load_config({}, image | replica).config.http.port == 8000
    assert replica.keys() <= {variable_of(name) for name in OPTIONS.options}
    grace = load_config({}, replica).config.http.shutdown_grace_seconds
    assert int(service["stop_grace_period"].removesuffix("s")) > grace


def test_the_environment_sample_names_every_variable_of_the_compose_file() -> None:
    used = set(re.findall(r"\$\{(\w+)", (DOCKER / "compose.yaml").read_text()))
    sample = (DOCKER / ".env.example").read_text()
    assert set(re.findall(r"^(\w+)=", sample, re.MULTILINE)) == used


def dockerfile_steps() -> list[str]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    return [step for step in text.replace("\\\n", " ").splitlines() if step]


def test_the_image_runs_as_nobody_special_and_in_exec_form() -> None:
    steps = dockerfile_steps()
    final = steps[max(i for i, step in enumerate(steps) if step.startswith("FROM")) :]
    by_name = {step.split()[0]: step for step in final}
    assert by_name["USER"] == "USER 10001:10001"
    assert json.loads(by_name["ENTRYPOINT"].removeprefix("ENTRYPOINT ")) == ["outrider"]
    assert json.loads(by_name["CMD"].removeprefix("CMD ")) == ["serve"]
    assert by_name["VOLUME"] == "VOLUME /models"


def health_check() -> list[str]:
    [step] = [step for step in dockerfile_steps() if step.startswith("HEALTHCHECK")]
    command: list[str] = json.loads(step.partition(" CMD ")[2])
    assert command[:2] == ["python", "-c"]
    return [sys.executable, *command[1:]]


def test_the_image_is_healthy_as_its_server_is_and_whatever_proxy_is_set() -> None:
    engine = FakeEngine()
    metrics = Metrics(model_name="fake", method="ngram", max_draft_tokens=4)
    with running_server(create_app(engine, AppSettings(), metrics)) as server:
        environment = {"OUTRIDER_PORT": str(server.port), "HTTP_PROXY": "http://127.0.0.1:1"}
        environment |= {"http_proxy": environment["HTTP_PROXY"]}
        assert subprocess.run(health_check(), env=environment, check=False).returncode == 0
        engine.alive = False
        assert subprocess.run(health_check(), env=environment, check=False).returncode == 1
    done = subprocess.run(health_check(), env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1][:22]) == (1, "ConnectionRefusedError")


def test_the_image_is_built_only_if_its_operators_can_be_loaded() -> None:
    steps = dockerfile_steps()
    [step] = [step for step in steps if "load_operators" in step]
    command = json.loads(step.removeprefix("RUN "))
    assert command[:2] == ["python", "-c"]
    # It is the user's own step, in the stage without a compiler.
    assert max(i for i, each in enumerate(steps) if each.startswith("FROM")) < steps.index(step)
    need_operators()
    script = (
        "import engine.model.cpu_ops.build as build\nbuild.load_operators = lambda folder: {}\n" + command[2]
    )
    for loaded, status in (("None", 1), ("1", 0)):
        done = subprocess.run([sys.executable, "-c", script.format(loaded)], cwd=ROOT, check=False)
        assert done.returncode == status


def test_both_stages_are_of_the_same_system() -> None:
    images = [step.split()[1] for step in dockerfile_steps() if step.startswith("FROM")]
    assert images == ["python:${PYTHON_VERSION}-${DEBIAN}", "python:${PYTHON_VERSION}-slim-${DEBIAN}"]


def test_the_image_installs_extras_that_exist_at_versions_that_are_held() -> None:
    [step] = [step for step in dockerfile_steps() if ".[" in step]
    named = {name for extras in re.findall(r"'\.\[(.+?)\]'", step) for name in extras.split(",")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert named == {"fast", "quantization"}
    assert named <= project["optional-dependencies"].keys()
    assert step.count("--constraint constraints.txt") == step.count("pip install")


def test_each_replica_gets_a_gpu_of_its_own() -> None:
    services = load_yaml(DOCKER / "compose.cuda.yaml")["services"]
    replicas = {
        name for name, service in load_yaml(DOCKER / "compose.yaml")["services"].items() if "build" in service
    }
    assert services.keys() == replicas
    devices = [
        service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for service in services.values()
    ]
    assert sorted(map(tuple, devices)) == [("0",), ("1",)]


def test_what_the_image_copies_is_there_and_let_through() -> None:
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in patterns if line.startswith("!")]
    assert "*" in patterns
    for step in dockerfile_steps():
        if step.startswith("COPY") and "--from" not in step:
            for source in step.split()[1:-1]:
                assert (ROOT / source).exists(), step
                assert any(fnmatch(source.split("/")[0], pattern) for pattern in allowed), step


@pytest.mark.skipif(not (BIN / "hadolint").exists(), reason="hadolint has no package for this platform")
def test_the_dockerfile_is_clean_for_the_linter() -> None:
    done = subprocess.run(
        [BIN / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", ["compose.yaml", "compose.cuda.yaml"])
def test_the_compose_files_fit_their_schema(file: str) -> None:
    command = [str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(DOCKER / file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
