"""The schemas of the API: generated from what is sent, and true to what requests may hold."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest

from clairai.fields import capture, packed_vector, rules, steer, when
from clairai.proxy import schema
from clairai.proxy.routes import ROUTES
from clairai.weights.manifest import Manifest
from clairai.wire import control_messages, steering_messages, weights_messages

COMPONENTS: Final[dict[str, Any]] = schema.make_components()


@pytest.mark.parametrize(
    ("name", "struct", "hidden"),
    [
        ("ProbeInfo", control_messages.ListedProbe, set()),
        ("VectorInfo", steering_messages.ListedVector, set()),
        ("WeightsState", weights_messages.WeightsState, {"socket"}),
        ("WeightsCommitted", weights_messages.WeightsCommitted, {"probe_rows", "vector_rows"}),
        ("WeightsManifest", Manifest, set()),
    ],
)
def test_an_answer_of_the_engine_has_the_fields_of_its_wire_struct(
    name: str, struct: type[msgspec.Struct], hidden: set[str]
) -> None:
    assert {*COMPONENTS[name]["properties"]} == {*struct.__struct_encode_fields__} - hidden


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("SteerEntry", steer._ENTRY_KEYS),
        ("Gate", steer._GATE_KEYS),
        ("StopRule", rules._KEYS),
        ("Window", when._KEYS),
        ("InlineVector", packed_vector._KEYS),
        ("CaptureRequest", capture._KNOWN),
    ],
)
def test_a_part_of_a_request_has_the_keys_that_its_parser_knows(
    name: str, keys: tuple[str, ...]
) -> None:
    assert {*COMPONENTS[name]["properties"]} == {*keys}


def test_a_field_that_may_be_unset_is_not_required_and_every_other_is() -> None:
    update = COMPONENTS["ProbeUpdateEvent"]
    assert {*update["properties"]} - {*update["required"]} == {"lost", "weights", "media"}
    assert msgspec.json.encode(schema.ProbeScores(names=("a",), start=0, scores=[[None]])) == (
        b'{"names":["a"],"start":0,"scores":[[null]]}'
    )


def test_every_reference_leads_to_a_schema() -> None:
    def references(value: object) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if "$ref" in value else set()
            return own.union(*map(references, value.values()))
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    known = {schema.REF.format(name=name) for name in COMPONENTS}
    assert references(COMPONENTS) <= known
    kinds = [kind for route in ROUTES for kind in (route.takes, route.answers)]
    structs = [kind for kind in kinds if isinstance(kind, type)]
    assert {schema.component_name(kind) for kind in structs} <= COMPONENTS.keys()
