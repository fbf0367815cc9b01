"""Kernels that steer compile for a GPU where there is none: the interpreter forgives more types."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from clairai.engine.capture import rp8_kernel
from clairai.engine.publish import header_layout, publish_kernel
from clairai.engine.publish.gpu_launcher import kernel_constants
from clairai.engine.score import norm_kernel, stash_copy_kernel, stash_kernel
from clairai.engine.steer import steer_kernel
from clairai.ring.layout import RingShape

HOPPER = GPUTarget("cuda", 90, 32)
WIDTH = 4096
POINTERS = {
    **dict.fromkeys(("map_ptr", "words_ptr", "num_ops_ptr", "token_ids_ptr", "ran_ptr"), "*i32"),
    **dict.fromkeys(("reals_ptr", "vectors_ptr", "gates_ptr", "state_ptr", "states_ptr"), "*fp32"),
    **dict.fromkeys(("reads_ptr", "special_ptr"), "*u8"),
}
CONSTANTS = ("BLOCK_D", "IS_PAIR", "KEEPS_STATES")
ALIGNED = ("D", "stride_x", "stride_residual")  # as every real width is


ROWS = ("x_ptr", "residual_ptr", "weight_ptr", "normed_ptr", "stream_ptr", "stash_ptr")


def compiled(kernel: Any, dtype: str, num_warps: int = 8, **constants: Any) -> Any:
    types = POINTERS | {"steered_ptr": "*i32", "epsilon": "fp32"} | dict.fromkeys(ROWS, f"*{dtype}")
    names = kernel.arg_names
    signature = {n: "constexpr" if n in CONSTANTS else types.get(n, "i32") for n in names}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in (*types, *ALIGNED)
        if name in names and name != "epsilon"
    }
    source = ASTSource(kernel, signature, {"BLOCK_D": WIDTH, **constants}, aligned)
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    return triton.compile(source, target=HOPPER, options=options)


def check(made: Any) -> None:
    assert made.asm["cubin"]
    assert ".local" not in made.asm["ptx"]  # where a compiler puts what does not fit
    assert made.metadata.shared <= 1024


@pytest.mark.parametrize(("dtype", "is_pair"), [("bf16", True), ("fp16", True), ("fp32", False)])
def test_a_row_that_is_steered_stays_in_registers(
    dtype: str, is_pair: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for keeps_states in (False, True):
        check(compiled(steer_kernel.steer, dtype, IS_PAIR=is_pair, KEEPS_STATES=keeps_states))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_row_in_its_norm_stays_in_registers(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    check(compiled(norm_kernel.norm, dtype))
    for keeps_states in (False, True):
        check(compiled(norm_kernel.norm_steered, dtype, KEEPS_STATES=keeps_states))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_row_is_copied_in_the_widest_pieces_that_a_thread_can_move(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block = stash_copy_kernel.MAX_BLOCK_D
    ptx = compiled(stash_copy_kernel.copy_to_stash, dtype, num_warps=4, BLOCK_D=block).asm["ptx"]
    assert ptx.count("ld.global") == ptx.count("ld.global.v4.b32") == 1
    assert ptx.count("st.global.v4.b32") == 1
    assert ptx.count("st.global") == 2  # and the note that the tap ran


PROJECT_TYPES = {
    **dict.fromkeys(("planes_ptr", "signs_ptr"), "*i8"),
    **dict.fromkeys(("sums_ptr", "exponent_ptr", "infinite_ptr"), "*i32"),
    **dict.fromkeys(("low_ptr", "high_ptr"), "*fp32"),
    "codes_ptr": "*u8",
    "factor_bits": "i64",
}


def projecting(kernel: Any, dtype: str, constants: dict[str, int], **options: Any) -> Any:
    types = PROJECT_TYPES | {"rows_ptr": f"*{dtype}"}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    pointers = [n for n in names if n.endswith("_ptr") or n in ("D", "S")]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=HOPPER, options={"enable_fp_fusion": True, **options})


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_row_that_is_projected_stays_in_registers(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = [
        projecting(rp8_kernel.split_into_planes, dtype, {"BLOCK_D": WIDTH}, num_warps=8),
        projecting(rp8_kernel.combine_sums, dtype, {"TILE_K": rp8_kernel.COMBINED_K}, num_warps=4),
    ]
    for one in made:
        assert one.asm["cubin"]
        assert ".local" not in one.asm["ptx"]


def test_a_projection_is_a_product_of_bytes_on_tensor_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tiling = rp8_kernel.TILING
    tiles = {"TILE_D": rp8_kernel.TILE_D, **{n: tiling[n] for n in ("TILE_R", "TILE_K")}}
    options = {name: tiling[name] for name in ("num_warps", "num_stages")}
    made = projecting(rp8_kernel.project_planes, "bf16", tiles, **options)
    assert re.search(r"wgmma\.mma_async[.\w]*\.s32\.s8\.s8", made.asm["ptx"])
    assert made.metadata.shared <= 166_912  # of an A100


COMMIT_TYPES = {
    **dict.fromkeys(("ring_ptr", "header_ptr", "column_ptr", "positions_ptr"), "*i64"),
    **dict.fromkeys(("headers_ptr", "turn_ptr"), "*i64"),
    **dict.fromkeys(("token_ids_ptr", "ticket_ptr"), "*i32"),
    "scores_ptr": "*fp32",
}
IN_GRAPH = {
    **kernel_constants(RingShape(64, 4096, 4), 256),
    "NUM_HEADERS": header_layout.NUM_HEADERS,
    "HEADER_WORDS": header_layout.header_words(256, 8192),
}
MARK_TYPES = {"header_ptr": "*i64", "starts_ptr": "*i32", "rejected_ptr": "*i32"}
MARK_CONSTANTS = {
    "MAX_R": 256,
    "MAX_E": header_layout.MAX_EVENTS,
    "TILE_W": publish_kernel.TILE_W,
}
STASH_TYPES = {
    **dict.fromkeys(("stash_ptr", "weights_ptr"), "*bf16"),
    **dict.fromkeys(("bias_ptr", "scores_ptr", "partial_ptr"), "*fp32"),
    **dict.fromkeys(("activation_ptr", "stashed_ptr", "ticket_ptr"), "*i32"),
}
STASH_CONSTANTS = {"TILE_T": 16, "SLICE_D": 128, "TILE_K": 16, "IS_SPLIT": True, "NUM_SLICES": 32}


def after_the_forward(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any
) -> Any:
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=HOPPER, options={"enable_fp_fusion": True, **options})


def parameters(ptx: str) -> list[int]:
    """The size of each parameter of the kernel, as the driver reports it."""
    entry = ptx[ptx.index(".entry") :]
    entry = entry[: entry.index(")")]
    return [int(bits) // 8 for bits in re.findall(r"\.param \.[ub](\d+)", entry)]


@pytest.mark.parametrize(
    ("kernel", "types", "constants"),
    [
        (publish_kernel.publish_step, COMMIT_TYPES, kernel_constants(RingShape(64, 4096, 4), 256)),
        (publish_kernel.publish_in_graph, COMMIT_TYPES, IN_GRAPH),
        (publish_kernel.mark_rejected, MARK_TYPES, MARK_CONSTANTS),
        (stash_kernel.score_stash, STASH_TYPES, STASH_CONSTANTS),
        (stash_kernel.score_stash_wide, STASH_TYPES, STASH_CONSTANTS),
    ],
    ids=["commit", "commit_in_graph", "mark", "score_stash", "score_stash_wide"],
)
def test_what_is_launched_by_the_driver_itself_has_the_parameters_that_we_give(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = after_the_forward(kernel, types, constants)
    kinds = [kind for kind in made.src.signature.values() if kind != "constexpr"]
    sizes = [8 if kind.startswith("*") else 4 for kind in kinds]
    found = parameters(made.asm["ptx"])
    assert found[: len(sizes)] == sizes
    assert set(found[len(sizes) :]) <= {8}  # Triton's own, which stay null
    assert made.metadata.global_scratch_size == 0


def test_a_step_is_published_by_stores_and_no_exchange_reaches_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = RingShape(64, 4096, 4)
    made = after_the_forward(
        publish_kernel.publish_step, COMMIT_TYPES, kernel_constants(shape, 256)
    )
    ptx = made.asm["ptx"]
    assert ptx.count("st.release.sys.global.u64") == 2
    assert "atom.global.sys.release" not in ptx
    assert ptx.count("atom.global") == 1  # the ticket, which lies on the device


@pytest.mark.parametrize("tile_k", [16, 64])
def test_what_is_scored_from_the_stash_fits_a_gpus_shared_memory(
    tile_k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shared_nbytes = 232_448  # of an H200
    for one in stash_kernel.stash_tilings(tile_k, is_split=True, shared_nbytes=shared_nbytes):
        tiles = STASH_CONSTANTS | {"TILE_T": one.tile_t, "TILE_K": tile_k}
        options = {"num_warps": one.num_warps, "num_stages": one.num_stages}
        made = after_the_forward(stash_kernel.score_stash, STASH_TYPES, tiles, **options)
        assert made.metadata.shared <= shared_nbytes
        assert ".local" not in made.asm["ptx"]
