"""Every error has a status that says whose fault it is."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from clairai import errors
from clairai.server.error_status import STATUSES, status_of

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.ClairaiError)
]


def test_every_error_has_its_own_line_in_the_table() -> None:
    assert [kind.__name__ for kind in KINDS if kind not in STATUSES] == []


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.RequestError, HTTPStatus.BAD_REQUEST),
        (errors.ProbeError, HTTPStatus.BAD_REQUEST),
        (errors.CapacityError, HTTPStatus.CONFLICT),
        (errors.StoreDamagedError, HTTPStatus.INTERNAL_SERVER_ERROR),
        (errors.EngineGoneError, HTTPStatus.SERVICE_UNAVAILABLE),
        (errors.StoreStoppedError, HTTPStatus.INSUFFICIENT_STORAGE),
        (errors.ClairaiError, HTTPStatus.INTERNAL_SERVER_ERROR),
    ],
)
def test_what_a_client_sent_is_its_own_and_what_a_server_has_is_the_servers(
    kind: type[errors.ClairaiError], status: HTTPStatus
) -> None:
    assert status_of(kind("why")) == status


def test_an_error_that_is_not_listed_has_the_status_of_its_kind() -> None:
    class OddShard(errors.StoreDamagedError):
        code = "odd"

    assert status_of(OddShard("why")) == HTTPStatus.INTERNAL_SERVER_ERROR
