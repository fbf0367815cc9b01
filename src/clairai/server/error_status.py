"""The HTTP status of each error: whose fault it is, and whether to try again.

Runs in: the API server.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

from clairai import errors
from clairai.errors import ClairaiError

# An error without a line has that of the class it is a kind of.
STATUSES: Final[Mapping[type[ClairaiError], HTTPStatus]] = MappingProxyType(
    {
        # What was sent is wrong: 400.
        errors.PointError: HTTPStatus.BAD_REQUEST,
        errors.ProbeError: HTTPStatus.BAD_REQUEST,
        errors.VectorError: HTTPStatus.BAD_REQUEST,
        errors.WeightsError: HTTPStatus.BAD_REQUEST,
        errors.RequestError: HTTPStatus.BAD_REQUEST,
        errors.StoreError: HTTPStatus.BAD_REQUEST,  # a selection of rows that cannot be made
        errors.ForbiddenError: HTTPStatus.FORBIDDEN,
        errors.NoScoresError: HTTPStatus.NOT_FOUND,
        # It is right, and the engine's present state is against it: 409.
        errors.SteeringOffError: HTTPStatus.CONFLICT,
        errors.CaptureOffError: HTTPStatus.CONFLICT,
        errors.WeightsOffError: HTTPStatus.CONFLICT,
        errors.CapacityError: HTTPStatus.CONFLICT,
        errors.VectorCapacityError: HTTPStatus.CONFLICT,
        errors.WeightsBusyError: HTTPStatus.CONFLICT,
        # The server's own: its settings, its disk, its memory, its engine.
        ClairaiError: HTTPStatus.INTERNAL_SERVER_ERROR,
        errors.ConfigError: HTTPStatus.INTERNAL_SERVER_ERROR,
        errors.WeightsTornError: HTTPStatus.INTERNAL_SERVER_ERROR,
        errors.RequestFailedError: HTTPStatus.INTERNAL_SERVER_ERROR,
        errors.TapMissingError: HTTPStatus.INTERNAL_SERVER_ERROR,
        errors.RanksDisagreeError: HTTPStatus.INTERNAL_SERVER_ERROR,
        errors.CoresDifferError: HTTPStatus.INTERNAL_SERVER_ERROR,
        errors.RingError: HTTPStatus.INTERNAL_SERVER_ERROR,
        errors.HandshakeError: HTTPStatus.INTERNAL_SERVER_ERROR,
        errors.StoreDamagedError: HTTPStatus.INTERNAL_SERVER_ERROR,
        errors.EncodingError: HTTPStatus.INTERNAL_SERVER_ERROR,
        errors.RowsLostError: HTTPStatus.INTERNAL_SERVER_ERROR,
        errors.ModelError: HTTPStatus.INTERNAL_SERVER_ERROR,
        errors.UnsupportedError: HTTPStatus.NOT_IMPLEMENTED,
        errors.EngineGoneError: HTTPStatus.SERVICE_UNAVAILABLE,
        errors.StoreBusyError: HTTPStatus.SERVICE_UNAVAILABLE,
        errors.WeightsRoomError: HTTPStatus.INSUFFICIENT_STORAGE,
        errors.CaptureDownError: HTTPStatus.SERVICE_UNAVAILABLE,
        errors.StoreStoppedError: HTTPStatus.INSUFFICIENT_STORAGE,
    }
)


def status_of(error: ClairaiError) -> HTTPStatus:
    listed = (STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)
    return next(listed)
