"""Settings that the proxy refuses."""

from __future__ import annotations

import pytest

from clairai.errors import ConfigError
from clairai.proxy.proxy_settings import ProxySettings


@pytest.mark.parametrize("upstream", ["", "127.0.0.1:8000", "ftp://x", "http://", "file:///etc"])
def test_an_upstream_that_is_no_address_is_refused(upstream: str) -> None:
    with pytest.raises(ConfigError, match="upstream"):
        ProxySettings(upstream)


@pytest.mark.parametrize("origin", ["*", "null", "localhost:5173", "http://a/b", "http://"])
def test_an_origin_that_is_none_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="origin"):
        ProxySettings("http://127.0.0.1:1", allowed_origins=(origin,))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "gpu.lan", ""])  # noqa: S104
def test_a_host_that_others_can_reach_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        ProxySettings("http://127.0.0.1:1", host=host)
    assert ProxySettings("http://127.0.0.1:1", host=host, api_key="k")


def test_an_empty_key_is_no_key() -> None:
    with pytest.raises(ConfigError, match="empty"):
        ProxySettings("http://127.0.0.1:1", api_key="")
