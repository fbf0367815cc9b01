"""The bank's tables, on a CPU: what a tap leaves there is what the probes would score.

T = tokens, D = model width, S = sites, K = capacity of a site, P = probes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from clairai.engine.score.row_upload import SlotRows
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.side_stream import AfterTaps, NoSideStream
from clairai.errors import TapMissingError
from clairai.points import Point
from clairai.probe.bank import EngineBank
from clairai.probe.model import Probe

WIDTH, CAPACITY, MAX_TOKENS = 8, 3, 16
POINTS = tuple(Point("post_block", layer) for layer in range(4))
SITES = tuple(map(str, POINTS))


def made(name: str, layer: int, seed: int) -> Probe:
    direction_D = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
    return Probe(name, POINTS[layer], direction_D)


def tables() -> ScoreTables:
    return ScoreTables(SITES, width=WIDTH, capacity=CAPACITY, max_tokens=MAX_TOKENS, device="cpu")


def empty() -> EngineBank:
    return EngineBank.empty(POINTS, CAPACITY, WIDTH, "toy")


def bank() -> EngineBank:
    """Several probes at a site, one elsewhere, none at the rest; columns are not in this order."""
    added = empty().add([made("a", 2, 1), made("b", 0, 2), made("c", 2, 3), made("d", 2, 4)])
    return added.add([made("e", 0, 5)])


def hidden(seed: int, num_tokens: int = 5) -> torch.Tensor:
    return torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def forward(held: ScoreTables, num_tokens: int = 5) -> dict[str, torch.Tensor]:
    """One forward pass: every site is given rows of its own."""
    rows = {site: hidden(index, num_tokens) for index, site in enumerate(held.sites)}
    for site, rows_TD in rows.items():
        held.site(site).read(rows_TD)
    return rows


def oracle(columns: EngineBank, rows: dict[str, torch.Tensor]) -> NDArray[np.floating]:
    scores = [probe.apply(rows[str(probe.point)].float().numpy()) for probe in columns.probes]
    return np.stack(scores, axis=1)


def test_every_column_is_its_own_probe_at_its_own_site() -> None:
    held, columns = tables(), bank()
    held.load(columns)
    rows = forward(held)
    np.testing.assert_allclose(held.gather(5).numpy(), oracle(columns, rows), rtol=1e-5, atol=1e-5)


def test_a_column_read_from_another_slot_would_be_noticed() -> None:
    held, columns = tables(), bank()
    held.load(columns)
    rows = forward(held)
    held.offset_C[:5] = held.offset_C[:5].roll(1)
    assert not np.allclose(held.gather(5).numpy(), oracle(columns, rows), atol=1e-2)


def test_only_the_rows_of_this_step_are_gathered() -> None:
    held, columns = tables(), bank()
    held.load(columns)
    forward(held, MAX_TOKENS)
    rows = forward(held, 2)
    scores_TP = held.gather(2).numpy()
    assert scores_TP.shape == (2, 5)
    np.testing.assert_allclose(scores_TP, oracle(columns, rows), rtol=1e-5, atol=1e-5)
    assert held.gather(0).shape == (0, 5)


def test_what_was_gathered_stays_when_the_next_forward_overwrites_the_tables() -> None:
    held = tables()
    held.load(bank())
    forward(held)
    first_TP = held.gather(5)
    before = first_TP.clone()
    for site in SITES:
        held.site(site).read(torch.full((5, WIDTH), 100.0))
    assert torch.equal(first_TP, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rows_of_any_precision_are_multiplied_in_float32(dtype: torch.dtype) -> None:
    held, columns = tables(), bank()
    held.load(columns)
    rows = {site: hidden(index).to(dtype) for index, site in enumerate(SITES)}
    for site, rows_TD in rows.items():
        held.site(site).read(rows_TD)
    scores_TP = held.gather(5)
    assert scores_TP.dtype == torch.float32
    np.testing.assert_allclose(scores_TP.numpy(), oracle(columns, rows), rtol=1e-5, atol=1e-5)


def test_a_product_in_bfloat16_would_be_noticed() -> None:
    columns = bank()
    rows_TD = hidden(0).bfloat16()
    direction_D = torch.tensor(columns.probes[0].direction_D)
    rough_T = (rows_TD @ direction_D.bfloat16()).float().numpy()
    exact_T = columns.probes[0].apply(rows_TD.float().numpy())
    assert not np.allclose(rough_T, exact_T, rtol=1e-5, atol=1e-5)


def test_a_batch_of_sequences_is_read_as_its_rows_in_order() -> None:
    held, columns = tables(), bank()
    held.load(columns)
    rows = {site: hidden(index, 6) for index, site in enumerate(SITES)}
    for site, rows_TD in rows.items():
        held.site(site).read(rows_TD.view(2, 3, WIDTH))
    np.testing.assert_allclose(held.gather(6).numpy(), oracle(columns, rows), rtol=1e-5, atol=1e-5)


def test_more_rows_than_the_tables_hold_are_refused() -> None:
    held = tables()
    site = held.site(SITES[0])
    site.read(hidden(0, MAX_TOKENS))
    with pytest.raises(TapMissingError, match="a forward of 17 rows, tables hold 16"):
        site.read(hidden(0, MAX_TOKENS + 1))


STASH_ROWS = 6


class CountedTaps(AfterTaps):
    """Notes the tokens of each tap that ran."""

    def __init__(self) -> None:
        super().__init__(NoSideStream())
        self.noted: list[int] = []

    def tap_ran(self, num_tokens: int) -> None:
        self.noted.append(num_tokens)


def stashing() -> tuple[ScoreTables, CountedTaps]:
    """Tables whose scores are 7 where nothing was scored."""
    held = ScoreTables(
        SITES,
        width=WIDTH,
        capacity=CAPACITY,
        max_tokens=MAX_TOKENS,
        device="cpu",
        stash_rows=STASH_ROWS,
    )
    for site in SITES:
        held.score_from_stash(site)
    held.load(bank())
    held.scores_STK.fill_(7.0)
    held.tail = counted = CountedTaps()
    return held, counted


@pytest.mark.parametrize("num_tokens", [1, STASH_ROWS])
def test_a_stash_site_leaves_its_rows_and_scores_nothing(num_tokens: int) -> None:
    held, counted = stashing()
    rows_TD = hidden(1, num_tokens)
    held.stash_site(SITES[2]).read(rows_TD)
    assert torch.equal(held.stash_SRD[2, :num_tokens], rows_TD)
    assert held.stash_SRD.count_nonzero() == rows_TD.count_nonzero()
    assert (held.scores_STK == 7.0).all()
    assert held.ran_S.tolist() == [0, 0, 1, 0]
    assert counted.noted == [num_tokens]


def test_a_step_that_the_stash_cannot_hold_is_scored_at_once() -> None:
    held, counted = stashing()
    rows = {site: hidden(index, STASH_ROWS + 1) for index, site in enumerate(SITES)}
    for site, rows_TD in rows.items():
        held.stash_site(site).read(rows_TD)
    found_TP = held.gather(STASH_ROWS + 1).numpy()
    np.testing.assert_allclose(found_TP, oracle(bank(), rows), rtol=1e-5, atol=1e-5)
    held.check_all_ran()
    assert counted.noted == [STASH_ROWS + 1] * len(SITES)


def test_no_row_of_an_earlier_step_stays_in_the_stash_when_a_longer_one_follows() -> None:
    """Padding alone can make a step longer than the stash: its rows are then scored from there."""
    held, _ = stashing()
    site = held.stash_site(SITES[0])
    site.read(hidden(1, STASH_ROWS))
    longer_TD = hidden(2, STASH_ROWS + 1)
    site.read(longer_TD)
    assert torch.equal(held.stash_SRD[0], longer_TD[:STASH_ROWS])


def test_a_stash_site_takes_a_batch_of_sequences_and_no_more_than_the_tables_hold() -> None:
    held, _ = stashing()
    site = held.stash_site(SITES[1])
    rows_TD = hidden(1, 6)
    site.read(rows_TD.view(2, 3, WIDTH))
    assert torch.equal(held.stash_SRD[1], rows_TD)
    with pytest.raises(TapMissingError, match="a forward of 17 rows, tables hold 16"):
        site.read(hidden(0, MAX_TOKENS + 1))


def test_pitfall_05_taps_that_did_not_run_are_named() -> None:
    held = tables()
    with pytest.raises(TapMissingError, match=r"4 of 4 taps .*post_block\.0, post_block\.1"):
        held.check_all_ran()
    for site in (SITES[0], SITES[3], SITES[2]):
        held.site(site).read(hidden(0))
    with pytest.raises(TapMissingError, match=r"1 of 4 taps .*first: post_block\.1\)"):
        held.check_all_ran()
    held.site(SITES[1]).read(hidden(0))
    held.check_all_ran()


def test_a_long_list_of_missing_taps_is_shortened() -> None:
    names = [f"post_block.{layer}" for layer in range(100)]
    many = ScoreTables(names, width=1, capacity=1, max_tokens=1, device="cpu")
    with pytest.raises(TapMissingError, match="100 of 100") as caught:
        many.check_all_ran()
    assert len(str(caught.value)) < 400


def test_a_removed_probe_leaves_zeros_in_its_place() -> None:
    held, columns = tables(), bank()
    held.load(columns)
    less = columns.remove(["a", "b", "d", "e"])
    held.load(less)
    assert held.weights_SHDK.count_nonzero() == WIDTH
    rows = forward(held)
    np.testing.assert_allclose(held.gather(5).numpy(), oracle(less, rows), rtol=1e-5, atol=1e-5)
    held.load(empty())
    assert held.weights_SHDK.count_nonzero() == 0
    assert held.gather(5).shape == (5, 0)


def test_a_replaced_probe_is_scored_from_the_next_forward_on() -> None:
    held, columns = tables(), bank()
    held.load(columns)
    changed = columns.replace(made("c", 2, 99))
    held.load(changed)
    rows = forward(held)
    np.testing.assert_allclose(held.gather(5).numpy(), oracle(changed, rows), rtol=1e-5, atol=1e-5)


def test_a_change_of_the_bank_keeps_every_address_that_a_captured_graph_holds() -> None:
    held = tables()
    before = [held.weights_SHDK.data_ptr(), held.scores_STK.data_ptr(), held.ran_S.data_ptr()]
    for columns in (bank(), bank().remove(["a"]), empty()):
        held.load(columns)
        forward(held)
    after = [held.weights_SHDK.data_ptr(), held.scores_STK.data_ptr(), held.ran_S.data_ptr()]
    assert after == before


def test_the_memory_the_tables_take_is_counted() -> None:
    # per site and column: a weight for each coordinate, a score for each token, bias, activation
    numbers = len(SITES) * CAPACITY * (WIDTH + MAX_TOKENS + 2)
    assert tables().nbytes == 4 * numbers


def contents(held: ScoreTables) -> tuple[bytes, ...]:
    """All that a bank writes, except for the offsets of former columns."""
    bank = (held.weights_SHDK, held.bias_SK, held.activation_SK, held.stashed_S)
    placed = held.offset_C[: held.num_columns]
    return tuple(tensor.numpy().tobytes() for tensor in (*bank, placed))


def changed(columns: EngineBank, rng: np.random.Generator, at: int) -> EngineBank:
    """The bank after a change: a probe comes, goes, is replaced, moves, or all are redirected."""
    names = list(columns.names)
    new = made(f"new{at}", int(rng.integers(len(POINTS))), int(rng.integers(1 << 30)))
    free = CAPACITY - sum(probe.point == new.point for probe in columns.probes)
    kind = rng.choice(["add", "remove", "replace", "turn", "turn all", "turn all"])
    if not names or (kind == "add" and free):
        return columns.add([new]) if free else columns
    chosen = [str(name) for name in rng.choice(names, rng.integers(1, len(names) + 1), False)]
    if kind == "remove":
        return columns.remove(chosen)
    if kind == "turn all":
        chosen = names
    if kind == "replace" and free:
        return columns.replace(dataclasses.replace(new, name=chosen[0], bias=1.5))
    rows_PD = rng.standard_normal((len(chosen), WIDTH)).astype(np.float32)
    return columns.redirect(chosen, rows_PD)


@pytest.mark.parametrize("seed", range(20))
def test_changes_written_one_by_one_equal_a_bank_that_is_written_whole(seed: int) -> None:
    rng, held, columns = np.random.default_rng(seed), tables(), bank()
    held.load(columns)
    for at in range(30):
        columns = changed(columns, rng, at)
        held.load(columns)
        fresh = tables()
        fresh.load(columns)
        assert contents(held) == contents(fresh)


def test_after_a_load_that_failed_half_way_the_next_one_writes_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, old = tables(), bank()
    held.load(old)
    before = contents(held)
    rows_PD = np.ones((len(old.names), WIDTH), np.float32)
    write, left = held._write, iter(range(1))

    def stops(part: SlotRows) -> None:
        if next(left, None) is None:
            raise MemoryError
        write(part)

    with monkeypatch.context() as patched:
        patched.setattr(held, "_write", stops)
        with pytest.raises(MemoryError):
            held.load(old.redirect(old.names, rows_PD))
    assert contents(held) != before
    held.load(old)
    assert contents(held) == before
