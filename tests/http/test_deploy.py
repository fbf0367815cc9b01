"""Board, alerts and manifests in deploy/ name only what a running proxy has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

import pytest
import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families

from clairai.cli.commands import app
from clairai.proxy.observe.metrics import Metrics
from clairai.proxy.observe.observer import FEATURES, OUTCOMES, HealthState
from clairai.proxy.routes import ROUTES
from tests.docs.test_pages import _anchors
from tests.http.answers import CHAT
from tests.http.fake import ACTIVATED
from tests.http.world import World, world
from tests.support.promql import Selector, read_expression
from tests.support.ring_engine import until

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "deploy"
RULES: Final = DEPLOY / "prometheus" / "clairai-alerts.yml"
BOARD: Final = json.loads((DEPLOY / "grafana" / "clairai.json").read_text())
ALERTS: Final[list[dict[str, Any]]] = [
    rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
]
MANIFESTS: Final = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
# What Prometheus adds to every series, and the series that it makes itself.
TARGET_LABELS: Final = frozenset(("job", "instance"))
OWN_SERIES: Final = {"up": frozenset[str]()}
# Labels whose values are known beforehand.
VALUES: Final = {
    "outcome": OUTCOMES,
    "state": get_args(HealthState),
    "feature": FEATURES,
    "reason": ("staging", "queue", "consumer"),
    "route": tuple(f"{route.method} {route.path}" for route in ROUTES),
    "status": ("2xx", "3xx", "4xx", "5xx", *(str(code) for code in range(400, 600))),
}
Series = dict[str, frozenset[str]]  # label names by the name of a sample


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """Of a proxy that has served, refused, captured and seen new weights."""
    with world(tmp_path_factory.mktemp("d"), metrics=Metrics()) as w:
        _use(w)
        with w.client() as client:
            text = client.get("/metrics").text
    return {
        sample.name: frozenset(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.startswith("vllm:")  # its own, which stand behind ours
    }


def _use(w: World) -> None:
    assert w.upstream.ring is not None
    with w.client() as client:
        client.post(CHAT, json={"messages": [], "clairai": {"capture": True}})
        client.post(CHAT, json={"messages": [], "clairai": {"bogus": True}})
    w.upstream.ring.rows(1, 0, [72], bank=ACTIVATED.version)
    until(lambda: w.proxy.feed.bank is not None and w.proxy.feed.bank.weights is not None)


def problems(expression: str, series: Series) -> list[str]:
    """What an expression names and nothing has."""
    found = read_expression(re.sub(r"\$__(range|rate_interval|interval)\b", "5m", expression))
    known = {**series, **OWN_SERIES}
    named = [one.name for one in found.selectors]
    unknown = [f"no series is named {name}" for name in named if name not in known]
    labels = TARGET_LABELS.union(*(known.get(name, frozenset()) for name in named))
    unknown += [f"nothing has the label {label}" for label in found.labels - labels]
    return unknown + [problem for one in found.selectors for problem in _wrong_matchers(one, known)]


def _wrong_matchers(selector: Selector, known: Series) -> Iterator[str]:
    labels = TARGET_LABELS | known.get(selector.name, frozenset())
    for label, operator, value in selector.matchers:
        if label not in labels:
            yield f"{selector.name} has no label {label}"
        for one in _values(operator, value) if label in VALUES else ():
            if not any(re.fullmatch(one, real) for real in VALUES[label]):
                yield f"no {label} is {one}"


def _values(operator: str, value: str) -> list[str]:
    """The patterns that a matcher takes, one by one."""
    if operator in ("=", "!="):
        return [re.escape(value)]
    return re.split(r"\|(?![^(]*\))", value)  # not inside parentheses


def _board_expressions() -> Iterator[tuple[str, str]]:
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for annotation in BOARD["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]


def _used(text: str) -> list[str]:
    """Labels in a legend, `{{probe}}`, or in an annotation, `{{ $labels.probe }}`."""
    return re.findall(r"{{\s*(?:\$labels\.)?(\w+)\s*}}", text)


def _labels_of(expression: str, series: Series) -> frozenset[str]:
    found = read_expression(re.sub(r"\$__\w+", "5m", expression))
    named = (series.get(one.name, frozenset()) for one in found.selectors)
    return TARGET_LABELS.union(*named)


@pytest.mark.parametrize(
    ("title", "expression"), [*_board_expressions()], ids=lambda text: text[:40]
)
def test_a_panel_shows_series_that_exist(title: str, expression: str, series: Series) -> None:
    assert title
    assert problems(expression, series) == []


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_is_about_series_that_exist(alert: dict[str, Any], series: Series) -> None:
    assert problems(alert["expr"], series) == []
    texts = " ".join(alert["annotations"].values())
    assert set(_used(texts)) <= _labels_of(alert["expr"], series)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_what_how_bad_and_where_to_read_on(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"]["summary"].endswith((".", "})."))
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert anchor == alert["alert"].lower()
    assert anchor in _anchors((ROOT / page).read_text())


def test_every_runbook_is_of_an_alert() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == [one["alert"] for one in ALERTS]


def test_panels_have_names_and_places_of_their_own_and_legends_that_exist(series: Series) -> None:
    panels = BOARD["panels"]
    for names in ([one["id"] for one in panels], [one["title"] for one in panels]):
        assert len(set(names)) == len(names)
    for panel in panels:
        for target in panel.get("targets", ()):
            assert set(_used(target["legendFormat"])) <= _labels_of(target["expr"], series)


def test_the_variables_of_the_board_are_labels_that_exist(series: Series) -> None:
    queries = [one["definition"] for one in BOARD["templating"]["list"] if one["type"] == "query"]
    for query in queries:
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert found is not None
        assert problems(found[1], series) == []
        assert found[2] in _labels_of(found[1], series)
    variables = {one["name"] for one in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(BOARD)))
    assert used == variables


def test_every_series_of_a_proxy_is_on_the_board_or_in_an_alert(series: Series) -> None:
    texts = [*(text for _, text in _board_expressions()), *(one["expr"] for one in ALERTS)]
    texts.append(json.dumps(BOARD["templating"]))
    shown = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in re.findall(r"clairai_\w+", " ".join(texts))
    }
    made = {re.sub(r"_(bucket|sum|count)$", "", name) for name in series}
    assert made - shown == set()


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(clairai_rows_lots_total[5m]) > 0", "no series is named clairai_rows_lots_total"),
        ("clairai_rows_lost > 0", "no series is named clairai_rows_lost"),
        ("clairai_first_token_seconds", "no series is named clairai_first_token_seconds"),
        ('clairai_streams{probe="x"}', "clairai_streams has no label probe"),
        ("sum by (porbe) (clairai_streams)", "nothing has the label porbe"),
        ("clairai_streams / on (probe) clairai_runs", "nothing has the label probe"),
        ('clairai_health{state="degarded"}', "no state is degarded"),
        ('clairai_health{state=~"failed|statring"}', "no state is statring"),
        ('clairai_requests_total{route="GET /nothing"}', "no route is GET\\ /nothing"),
    ],
)
def test_a_misspelt_name_is_found(expression: str, problem: str, series: Series) -> None:
    assert problems(expression, series) == [problem]


@pytest.mark.parametrize("text", ["reate(clairai_rows_total[5m])", "rate(x[5 minutes])", "a ? b"])
def test_an_expression_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"known|range|read"):
        read_expression(text)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("command", ["check", "test"])
def test_prometheus_itself_takes_the_rules_and_they_fire_when_they_should(command: str) -> None:
    file = RULES if command == "check" else RULES.with_name("clairai-alerts.test.yml")
    subprocess.run(["promtool", command, "rules", str(file)], check=True, capture_output=True)


def test_probes_of_the_manifest_are_routes_without_a_key_on_a_port_that_is_open() -> None:
    (container,) = MANIFESTS[0]["spec"]["template"]["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    public = {route.path for route in ROUTES if route.right == "public" and route.method == "GET"}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[name]["httpGet"]
        assert asked["port"] in ports
        assert asked["path"] in public
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    args = container["args"]
    assert int(args[args.index("--port") + 1]) in ports.values()
    (port,) = MANIFESTS[1]["spec"]["ports"]
    assert port["targetPort"] in ports


def test_the_command_of_the_manifest_is_one_of_clairai_and_its_volumes_exist() -> None:
    spec = MANIFESTS[0]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    program, command, _ = container["command"]
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    known = {option for one in commands[command].params for option in one.opts}
    assert program == "clairai"
    assert {word for word in container["args"] if word.startswith("--")} <= known
    volumes = {one["name"] for one in spec["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    paths = [word for word in container["args"] if word.startswith("/")]
    assert all(any(path.startswith(mount) for mount in mounts) for path in paths)
    labels = MANIFESTS[0]["spec"]["template"]["metadata"]["labels"]
    assert MANIFESTS[0]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert MANIFESTS[1]["spec"]["selector"].items() <= labels.items()
