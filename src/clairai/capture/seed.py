"""Takes the seed's switches, VLLM_ACT_*, from the environment; gives the setting they stand for.

Every request is captured at every point, in an .npz for each sequence and layer. The residual
stream is whole on every rank, so `sharded` and `gathered` give the same: all of each row, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from clairai.errors import ConfigError
from clairai.points import quote

CAPTURE: Final = "VLLM_ACT_CAPTURE"
MODE: Final = "VLLM_ACT_MODE"
RP_K: Final = "VLLM_ACT_RP_K"
RETURN: Final = "VLLM_ACT_RETURN"
OUTDIR: Final = "VLLM_ACT_OUTDIR"
MODES: Final = ("rp8", "full8", "topk8")
RETURNS: Final = ("sharded", "gathered")
# What its README says where a switch is not set.
USUAL: Final[Mapping[str, str]] = {
    MODE: "rp8",
    RP_K: "512",
    RETURN: "sharded",
    OUTDIR: "/tmp/vllm_activations",  # noqa: S108  # the store makes it private, or refuses it
}
EVERYWHERE: Final = ("post_block.*",)
SEAL_AFTER_S: Final = 3600.0  # a sequence is written when it ends


def seed_setting(environ: Mapping[str, str], *, has_points: bool) -> dict[str, Any] | None:
    """A `capture` setting; None unless VLLM_ACT_CAPTURE is 1. ConfigError for a wrong value."""
    if _one_of(environ, CAPTURE, ("0", "1"), usual="0") == "0":
        return None
    _one_of(environ, RETURN, RETURNS, usual=USUAL[RETURN])
    mode = _one_of(environ, MODE, MODES, usual=USUAL[MODE])
    encoder: dict[str, Any] = {"name": mode}
    if mode == "rp8":
        encoder["k"] = _dimensions(environ)
    folder = environ.get(OUTDIR) or USUAL[OUTDIR]
    return {
        "consumers": {"npz": {"folder": folder, "seal_after_s": SEAL_AFTER_S}},
        "points": ["all"] if has_points else list(EVERYWHERE),
        "encoder": encoder,
        "sample": 1.0,
    }


def _one_of(environ: Mapping[str, str], name: str, known: tuple[str, ...], *, usual: str) -> str:
    value = environ.get(name) or usual
    if value not in known:
        raise ConfigError(f"{name} is {quote(value)}; set it to one of {', '.join(known)}")
    return value


def _dimensions(environ: Mapping[str, str]) -> int:
    value = environ.get(RP_K) or USUAL[RP_K]
    if not value.isascii() or not value.isdecimal() or len(value) > 9:
        raise ConfigError(f"{RP_K} is {quote(value)}; set it to a whole number, such as 512")
    return int(value)
