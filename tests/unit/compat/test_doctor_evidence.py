"""The doctor says what is known of the values of an architecture, and what is not."""

from __future__ import annotations

from clairai.compat.doctor import describe_evidence


def test_an_architecture_held_against_hugging_face_has_its_worst_error() -> None:
    said = describe_evidence("LlamaForCausalLM")
    assert said.startswith("LlamaForCausalLM: values held against Hugging Face on vLLM 0.")
    assert said.endswith("e-06")


def test_an_architecture_held_against_vllm_says_so() -> None:
    assert "equal to those of vLLM's own blocks" in describe_evidence("Lfm2ForCausalLM")


def test_an_architecture_that_nobody_has_tried_is_not_called_verified() -> None:
    assert "values not verified" in describe_evidence("MyOwnForCausalLM")
