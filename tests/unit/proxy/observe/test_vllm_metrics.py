"""vLLM's own series stand beside the proxy's, and none is there twice."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from clairai.proxy.observe.vllm_metrics import join_metrics

OWN = b"""# HELP clairai_streams now
# TYPE clairai_streams gauge
clairai_streams 2.0
# HELP process_open_fds Number of open file descriptors.
# TYPE process_open_fds gauge
process_open_fds 9.0
"""
VLLM = b"""# HELP process_open_fds Number of open file descriptors.
# TYPE process_open_fds gauge
process_open_fds 77.0
# HELP vllm:time_to_first_token_seconds Histogram.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.001",model_name="m"} 0.0
vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 1.0
vllm:time_to_first_token_seconds_count{model_name="m"} 1.0
vllm:time_to_first_token_seconds_sum{model_name="m"} 0.5
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{model_name="m"} 3.0
"""


def values(text: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(text.decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_a_scrape_has_the_series_of_both() -> None:
    found = values(join_metrics(OWN, VLLM))
    assert found["clairai_streams"] == 2.0
    assert found["vllm:time_to_first_token_seconds_sum"] == 0.5
    assert found["vllm:prompt_tokens_total"] == 3.0


def test_a_family_that_both_have_is_our_own_and_there_once() -> None:
    joined = join_metrics(OWN, VLLM)
    assert joined.count(b"# TYPE process_open_fds") == 1
    assert values(joined)["process_open_fds"] == 9.0


def test_a_scrape_without_vllm_has_our_own_and_says_so() -> None:
    joined = join_metrics(OWN, None)
    assert values(joined) == values(OWN)
    assert b"vLLM's own series are missing" in joined
