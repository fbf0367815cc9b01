"""Which KV connectors are wrapped, and how; tests/engine/test_kv_connector.py has a real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from clairai.compat import kv_connectors
from clairai.errors import UnsupportedError


class ExampleConnector:
    """Names as the example connector makes them, if `is_keyed`."""

    _block_size = 16

    def __init__(self, is_keyed: bool) -> None:
        self._is_keyed = is_keyed

    def _generate_foldername_debug(self, tokens: Any, hashes: list[str]) -> str:
        return f"{tokens.tolist()}{hashes if self._is_keyed else ''}"

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        del request
        return 32 - num_computed, True


class OtherConnector(ExampleConnector):
    """One whose keys are not known."""


def test_a_connector_whose_names_leave_media_out_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="cannot carry a steering plan"):
        kv_connectors.connect(SimpleNamespace(connector=ExampleConnector(is_keyed=False)))


def test_an_engine_without_a_connector_has_nothing_to_wrap() -> None:
    kv_connectors.connect(SimpleNamespace(connector=None))
    kv_connectors.connect(SimpleNamespace())


@pytest.mark.parametrize(("is_skipping", "found"), [(False, (16, True)), (True, (0, False))])
def test_no_connector_brings_tokens_of_a_prompt_that_is_to_be_forwarded(
    is_skipping: bool, found: tuple[int, bool]
) -> None:
    connector = OtherConnector(is_keyed=False)
    kv_connectors.connect(SimpleNamespace(connector=connector))
    params = SimpleNamespace(extra_args=None)
    request = SimpleNamespace(sampling_params=params, skip_reading_prefix_cache=is_skipping)
    assert connector.get_num_new_matched_tokens(request, 16) == found
