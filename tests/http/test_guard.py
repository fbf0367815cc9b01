"""Who may do what: keys, names, other sites' pages, sizes; and a table that no route escapes."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Route as StarletteRoute

from clairai.proxy.app import create_app
from clairai.proxy.dashboard import CONTENT_SECURITY_POLICY
from clairai.proxy.handlers import HANDLERS
from clairai.proxy.proxy_settings import Limits, ProxySettings
from clairai.proxy.request_guard import host_names
from clairai.proxy.routes import ROUTES, Route
from tests.http.answers import CHAT, asking
from tests.http.world import World, world

KEY = "a-key-for-tests"
PAGE = {"index.html": "<!doctype html>", "assets/app-1a2b.js": "x=1", "assets/app-1a2b.css": "a{}"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("g")
    for name, text in PAGE.items():
        (folder / "page" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "page" / name).write_text(text)
    (folder / "secret").write_text("secret")
    origins = ("http://listed:5173",)
    with world(folder, api_key=KEY, page=folder / "page", allowed_origins=origins) as made:
        yield made


def call(w: World, route: Route, **headers: str) -> httpx.Response:
    path = re.sub(r"{(\w+)(:path)?}", "x", route.path)
    bodies = {"none": None, "json": b"{}", "probe": b"x", "vector": b"x", "manifest": b"{}"}
    bodies["file"] = bodies["form"] = b"x"
    with w.client() as client:
        return client.request(route.method, path, content=bodies[route.body], headers=headers)


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    found = set()
    for route in app.routes:
        assert isinstance(route, APIRoute | StarletteRoute)
        found |= {(method, route.path) for method in route.methods or ()}
    return found


def test_the_app_has_the_routes_of_the_table_and_no_others() -> None:
    app = create_app(ProxySettings(upstream="http://127.0.0.1:8000"))
    listed = {(route.method, route.path) for route in ROUTES}
    assert routes_of(app) == listed
    assert {route.handler for route in ROUTES} == set(HANDLERS)
    app.add_api_route("/debug", lambda: None)
    assert routes_of(app) != listed  # one more would be seen


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.handler)
def test_the_key_is_needed_exactly_where_the_table_says(guarded: World, route: Route) -> None:
    for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}):
        answer = call(guarded, route, **given)
        assert (answer.status_code == 401) == route.needs_key
    if route.needs_key:
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    right = call(guarded, route, Authorization=f"Bearer {KEY}")
    assert right.status_code not in (401, 403)


def test_only_the_page_and_health_are_open() -> None:
    handlers = {route.handler for route in ROUTES if not route.needs_key}
    assert handlers == {"health", "live", "ready", "page", "asset"}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.handler)
@pytest.mark.parametrize("origin", ["http://elsewhere", "null", "http://localhost:1", "file://"])
def test_other_sites_pages_change_nothing(w: World, route: Route, origin: str) -> None:
    answer = call(w, route, Origin=origin)
    assert (answer.status_code == 403) == route.changes
    assert "access-control-allow-origin" not in answer.headers


def test_every_route_that_is_not_just_read_is_marked_as_changing() -> None:
    assert all(route.changes == (route.method != "GET") for route in ROUTES)


def test_our_own_page_and_listed_origins_are_let_in(guarded: World, w: World) -> None:
    own = {"Origin": w.url, "Sec-Fetch-Site": "same-origin"}
    listed = {"Origin": "http://listed:5173", "Authorization": f"Bearer {KEY}"}
    with w.client() as client, guarded.client() as other:
        assert client.post(CHAT, json=asking(), headers=own).status_code == 200
        assert client.post(CHAT, json=asking(), headers={"Sec-Fetch-Site": "cross-site"}).is_error
        answer = other.post(CHAT, json=asking(), headers=listed)
        wanted = {"Origin": "http://listed:5173", "Access-Control-Request-Method": "POST"}
        asked = other.options(CHAT, headers=wanted)
        foreign = other.options(CHAT, headers={**wanted, "Origin": "http://elsewhere"})
        unlisted = client.options(CHAT, headers=wanted)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "http://listed:5173"
    assert "access-control-allow-credentials" not in answer.headers
    assert asked.headers["access-control-allow-origin"] == "http://listed:5173"
    assert "access-control-allow-origin" not in foreign.headers
    assert unlisted.status_code == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:9999", 200),
        ("[::1]:6969", 200),
        ("LOCALHOST", 200),
        ("evil.example", 421),
        ("evil.example:6969", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("evil.example#@localhost", 421),
        ("[::1", 421),
    ],
)
def test_a_name_that_is_not_ours_is_refused_on_loopback(w: World, host: str, status: int) -> None:
    with w.client() as client:
        assert client.get("/health", headers={"Host": host}).status_code == status


def test_names_are_checked_unless_the_proxy_is_meant_to_be_reached() -> None:
    def names(**more: Any) -> frozenset[str] | None:
        return host_names(ProxySettings(upstream="http://127.0.0.1:8000", **more))

    assert names(host="0.0.0.0", api_key="k") is None  # noqa: S104
    reached = names(host="10.0.0.1", api_key="k", allowed_hosts=("gpu.lan",))
    assert reached == frozenset(("10.0.0.1", "gpu.lan"))
    assert "::1" in (names(host="::1") or ())
    assert "gpu.lan" in (names(allowed_hosts=("gpu.lan",)) or ())


def test_every_answer_carries_the_security_headers(guarded: World) -> None:
    for route in ROUTES:
        for given in ({}, {"Authorization": f"Bearer {KEY}"}, {"Host": "evil"}):
            headers = call(guarded, route, **given).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "DENY"
            assert headers["referrer-policy"] == "no-referrer"
            assert "cache-control" in headers
            assert "server" not in headers


def test_the_page_is_served_with_its_policy_and_nothing_beside_it(guarded: World) -> None:
    with guarded.client() as client:
        page, script = client.get("/"), client.get("/assets/app-1a2b.js")
        beside = ["../secret", "%2e%2e/secret", "..%2fsecret", "/etc/passwd", "", "../index.html"]
        statuses = {client.get(f"/assets/{path}").status_code for path in beside}
    assert page.text == PAGE["index.html"]
    assert page.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert "'unsafe" not in CONTENT_SECURITY_POLICY
    assert page.headers["content-type"].startswith("text/html")
    assert script.headers["content-type"].startswith("text/javascript")
    assert "immutable" in script.headers["cache-control"]
    assert statuses == {404}


@pytest.mark.parametrize("has_length", [True, False])
def test_a_body_over_the_bound_is_refused_before_it_is_read(w: World, has_length: bool) -> None:
    size = (8 << 20) + 1
    content: Any = b"x" * size if has_length else (b"x" * 65536 for _ in range(129))
    with w.client() as client:
        answer = client.post(CHAT, content=content)
    assert answer.status_code == 413
    assert str(8 << 20) in answer.json()["error"]["message"]
    assert w.upstream.seen == []


@pytest.mark.parametrize("length", ["-1", "1e3", "9" * 40])
def test_a_length_that_is_no_number_is_refused(w: World, length: str) -> None:
    host, port = w.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
        sock.sendall(head.encode())
        assert sock.recv(100).split()[1] in (b"400", b"413")


def test_headers_have_a_bound_in_number_and_size(w: World) -> None:
    with w.client() as client:
        many = client.get("/health", headers=[("X-A", "1")] * 200)
        large = client.get("/health", headers={"X-A": "1" * (63 << 10), "X-B": "1" * 2000})
    assert many.status_code == 431
    assert large.status_code in (400, 431)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested"),
        (b'{"messages":[' + b'"",' * 200_000 + b'""]}', "strings"),
    ],
)
def test_a_body_that_is_too_deep_or_too_wide_is_refused(w: World, raw: bytes, reason: str) -> None:
    with w.client() as client:
        for path in (CHAT, "/tokenize"):
            answer = client.post(path, content=raw)
            assert answer.status_code == 400
            assert reason in answer.json()["error"]["message"]
    assert w.upstream.seen == []


def test_brackets_in_strings_are_not_depth(w: World) -> None:
    body = {"messages": [{"role": "user", "content": '[[{{"\\' * 1000}], "stream": True}
    with w.client() as client:
        assert client.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/fine_tuning/jobs", "/docs", "/redoc", "/v1/clairai/tokens", "/v1/models/"]
)
def test_what_is_not_in_the_table_does_not_exist(w: World, path: str) -> None:
    with w.client() as client:
        answer = client.get(path)
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_an_internal_error_shows_the_client_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path) as w, w.client() as client:
        monkeypatch.setattr(w.proxy.health, "status", None)
        answer = client.get("/health")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the proxy failed; see its log"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_n_has_a_bound(tmp_path: Path) -> None:
    with world(tmp_path, limits=Limits(choices=2)) as w, w.client() as client:
        assert client.post(CHAT, json={**asking(), "n": 3}).status_code == 400
        assert client.post(CHAT, json={**asking(), "n": 2}).status_code == 200
