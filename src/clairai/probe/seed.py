"""Takes the JSON of the first clairai, `{"vector": [...]}`, and its file name; gives a Probe.

`enc_19_name.json` is the probe `name` at post_block.19; without a layer in the file name the
caller's `target_layer` is used. Scores went through a ReLU there, so they do here.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from clairai import wire
from clairai.errors import ProbeError
from clairai.points import Point, quote
from clairai.probe.model import MAX_WIDTH, Probe
from clairai.probe.parse import strict_object, within

MAX_NBYTES: Final = 8 << 20

_FILE_NAME: Final = re.compile(r"enc_([0-9]{1,5})_(.+)", re.DOTALL)


def loads(data: bytes, *, source: str, target_layer: int | None = None) -> Probe:
    """The probe in `data`; `source` is its file name. Raises ProbeError, whatever the bytes.

    `bias`, `name`, `threshold` and `activation` are honoured where present, other keys ignored.
    """
    with within(source):
        if len(data) > MAX_NBYTES:
            raise ProbeError(f"{len(data)} bytes, and a JSON probe has at most {MAX_NBYTES}")
        fields = {key: value for key, value in strict_object(data).items() if value is not None}
        layer, name = _layer_and_name(source, target_layer)
        return Probe(
            name=cast(str, fields.get("name", name)),  # Probe checks the types of all of these
            point=Point("post_block", layer),
            direction_D=_direction(fields.get("vector")),
            bias=cast(float, fields.get("bias", 0.0)),
            activation=cast(wire.Activation, fields.get("activation", "relu")),
            threshold=cast(float | None, fields.get("threshold")),
        )


def _layer_and_name(source: str, target_layer: int | None) -> tuple[int, str]:
    stem = PurePath(source).stem
    matched = _FILE_NAME.fullmatch(stem)
    if matched is not None:
        return int(matched[1]), matched[2]
    if target_layer is None:
        raise ProbeError(
            "the file name does not say which layer; name it enc_LAYER_NAME.json, "
            "or set TARGET_LAYER"
        )
    return target_layer, stem


def _direction(vector: object) -> NDArray[np.float32]:
    if not isinstance(vector, list) or not vector:
        raise ProbeError(
            f"vector is {quote(vector)}; give a list of numbers as long as the model is wide"
        )
    if len(vector) > MAX_WIDTH:
        raise ProbeError(f"vector has {len(vector)} numbers; give at most {MAX_WIDTH}")
    # type() and not isinstance(): true and false are ints to isinstance.
    if any(type(item) not in (int, float) for item in vector):
        raise ProbeError("vector holds something other than numbers; give numbers only")
    try:
        with np.errstate(over="ignore"):  # what overflows is refused by Probe as infinity
            return np.array(vector, dtype=np.float64).astype(np.float32)
    except OverflowError:
        raise ProbeError("vector holds a number beyond float64; use finite numbers") from None
