"""What stages of a pipeline tell each other: sites at start-up; scores, gates, rows with each step.

GroupCoordinator.cpu_group     distributed/parallel_state.py        0.32
Worker.execute_model           v1/worker/gpu_worker.py              0.32:1302
PPMissingLayer                 model_executor/models/utils.py       0.32:852

A stage hands its scores to the next one among the very tensors that the next one goes on with, and
the last stage publishes them all: so a row has the scores of one forward of one token, whichever
stages they come from, and every reader sees one ring. Rows that are captured travel the same way,
to the one capture writer. A change of the bank reaches all ranks between the same two steps,
because a worker takes steps and control messages from one queue. All ranks hold tables of all
sites, and number them alike; each runs the taps of its own blocks. Runs in: the worker.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import torch

from clairai.compat.model_sites import Sites
from clairai.compat.ranks import gather_bytes
from clairai.engine.capture.stage_rows import EarlierRows, SentRows, StageCapture, StageStash
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.steer.steer_tables import SteerTables
from clairai.errors import TapMissingError
from clairai.points import Point

SCORES_KEY: Final = "clairai_scores"
GATES_KEY: Final = "clairai_gates"
# Only in steps with captured rows. vLLM's CPU build sends 8 tensors at most, one of them its own
# (csrc/cpu/shm.cpp MAX_P2P_SEND_TENSOR_NUM, 0.32); a model has 2.
PLACES_KEY: Final = "clairai_places"
ROWS_KEY: Final = "clairai_rows"


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline; an engine without pipeline parallelism has one."""

    index: int
    count: int
    is_publisher: bool  # of all ranks, the one that has the ring

    @property
    def is_alone(self) -> bool:
        return self.count == 1

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def find_publisher_rank(vllm_config: Any) -> int:
    """The first rank of the last stage: every rank of a stage holds the whole residual stream.

    Ranks are counted stage by stage: distributed/parallel_state.py initialize_model_parallel, 0.26
    and 0.32.
    """
    parallel = vllm_config.parallel_config
    return int((parallel.pipeline_parallel_size - 1) * parallel.tensor_parallel_size)


def find_stage(worker: Any) -> Stage:
    parallel = worker.vllm_config.parallel_config
    return Stage(
        worker.rank // parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        worker.rank == find_publisher_rank(worker.vllm_config),
    )


def put_publisher_first(vllm_config: Any, replies: Sequence[bytes]) -> list[bytes]:
    """The replies of all ranks, that of the rank with the ring first."""
    rank = find_publisher_rank(vllm_config)
    return [*replies[rank : rank + 1], *replies[:rank], *replies[rank + 1 :]]


@contextlib.contextmanager
def end_with_a_rank(stage: Stage | None) -> Iterator[None]:
    """End a rank of a pipeline that cannot do what the others do: rows would be of two banks.

    vLLM ends the engine with it.
    """
    try:
        yield
    except BaseException:
        if stage is None or stage.is_alone:
            raise
        logging.getLogger("vllm.clairai").critical(
            "a change of the bank failed in one rank of a pipeline: the engine ends, because its "
            "stages would score with different banks",
            exc_info=True,
        )
        os._exit(1)


class FoundSites(msgspec.Struct, frozen=True):
    """What one stage has found in its blocks, by the names of points."""

    site_of: Mapping[str, str]
    refused: Mapping[str, str]

    @classmethod
    def of(cls, local: Sites) -> FoundSites:
        told = (local.site_of, local.refused)
        return cls(*({str(point): text for point, text in one.items()} for one in told))


def join_sites(local: Sites) -> tuple[Sites, list[frozenset[str]]]:
    """The sites of all stages, of which modules are known for our own; and each stage's names.

    Every rank calls it once, when its model is loaded.
    """
    from vllm.distributed.parallel_state import get_pp_group

    own = msgspec.json.encode(FoundSites.of(local))
    found = gather_bytes(own, get_pp_group().cpu_group)
    return merge_sites(local, [msgspec.json.decode(one, type=FoundSites) for one in found])


def gather_fingerprints(own: str) -> list[str]:
    """Of each stage's weights, in their order. Every rank calls it once, as `join_sites`."""
    from vllm.distributed.parallel_state import get_pp_group

    return [one.decode() for one in gather_bytes(own.encode(), get_pp_group().cpu_group)]


def merge_sites(local: Sites, found: Sequence[FoundSites]) -> tuple[Sites, list[frozenset[str]]]:
    site_of = {Point.parse(point): site for one in found for point, site in one.site_of.items()}
    refused = {Point.parse(point): reason for one in found for point, reason in one.refused.items()}
    refused = {point: reason for point, reason in refused.items() if point not in site_of}
    names = [frozenset(one.site_of.values()) for one in found]
    return replace(local, site_of=site_of, refused=refused), names


def find_numbers(tables: ScoreTables, names: Sequence[frozenset[str]]) -> list[int]:
    """The numbers of these stages' sites in the tables; all ranks number sites alike."""
    return [
        number
        for number, site in enumerate(tables.sites)
        if any(site in of_stage for of_stage in names)
    ]


def make_earlier_rows(
    stage: Stage, names: Sequence[frozenset[str]], tables: ScoreTables
) -> EarlierRows:
    """Captured rows of the stages before this one; `names` are the sites of each stage."""
    return EarlierRows(StageStash(tables, find_numbers(tables, names[: stage.index])))


def make_stage_capture(
    stage: Stage,
    names: Sequence[frozenset[str]],
    tables: ScoreTables,
    site_of: Mapping[str, int],
    earlier: EarlierRows,
) -> StageCapture:
    """The listener of a stage that sends captured rows on."""
    handed = StageStash(tables, find_numbers(tables, names[: stage.index + 1]))
    return StageCapture(site_of, handed, earlier)


class StageHandover:
    """Takes what earlier stages have computed into our tables, and hands it on with our own.

    Scores go to the last stage, which publishes them, and so do captured rows, which it stores. The
    openings of gates go to every later one, where they may act; a gate keeps its state in the stage
    that reads its probe.
    """

    def __init__(
        self,
        stage: Stage,
        names: Sequence[frozenset[str]],
        tables: ScoreTables,
        steer_tables: SteerTables | None,
    ) -> None:
        """`names` are the sites of each stage."""
        self._stage, self._tables, self._steer_tables = stage, tables, steer_tables
        self._earlier_S = self._number_sites(names[: stage.index])
        self._handed_S = self._number_sites(names[: stage.index + 1])
        self._earlier_rows: EarlierRows | None = None
        self._capture: StageCapture | None = None

    def _number_sites(self, names: Sequence[frozenset[str]]) -> torch.Tensor:
        numbers = find_numbers(self._tables, names)
        return torch.tensor(numbers, dtype=torch.int64, device=self._tables.device)

    def capture_rows(self, earlier: EarlierRows, capture: StageCapture | None) -> None:
        """From now on give `earlier` the captured rows of earlier stages, and send on `capture`'s.

        The last stage has nobody to send them to.
        """
        self._earlier_rows, self._capture = earlier, capture

    def take(self, tensors: MutableMapping[str, torch.Tensor]) -> None:
        """Remove our tensors from those of the step, which the model is given next."""
        if len(self._earlier_S):
            scores_STK = _pop(tensors, SCORES_KEY)
            rows_STK = self._tables.scores_STK[:, : scores_STK.shape[1]]
            rows_STK.index_copy_(0, self._earlier_S, scores_STK)
        if self._steer_tables is not None:
            gates_TG = _pop(tensors, GATES_KEY)
            self._steer_tables.gates_TG[: len(gates_TG)].copy_(gates_TG)
        places_M, rows_MD = tensors.pop(PLACES_KEY, None), tensors.pop(ROWS_KEY, None)
        if self._earlier_rows is not None:
            has_none = places_M is None or rows_MD is None
            self._earlier_rows.receive(None if has_none else SentRows(places_M, rows_MD))

    def hand_on(self, tensors: MutableMapping[str, torch.Tensor], num_tokens: int) -> None:
        """Copies: our tables change with the next step, which begins before these are sent."""
        if len(self._handed_S):
            scores_STK = self._tables.scores_STK[:, :num_tokens]
            tensors[SCORES_KEY] = scores_STK.index_select(0, self._handed_S)
        if self._steer_tables is not None:
            tensors[GATES_KEY] = self._steer_tables.gates_TG[:num_tokens].clone()
        sent = None if self._capture is None else self._capture.take_rows()
        if sent is not None:
            tensors[PLACES_KEY], tensors[ROWS_KEY] = sent.places_M, sent.rows_MD


def _pop(tensors: MutableMapping[str, torch.Tensor], key: str) -> torch.Tensor:
    found = tensors.pop(key, None)
    if found is None:
        raise TapMissingError(
            f"a step came from an earlier pipeline stage without its {key}; the engine ends, "
            "because they would be those of another step. Please report it"
        )
    return found


def connect_stages(runner: Any, handover: StageHandover) -> None:
    """Wrap execute_model(scheduler_output, intermediate_tensors): v1 0.26:4111 0.32:3940."""
    from vllm.sequence import IntermediateTensors  # 0.26 and 0.32

    original = runner.execute_model

    @functools.wraps(original)
    def execute_model(scheduler_output: Any, intermediate: Any = None, **kwargs: Any) -> Any:
        if intermediate is None:
            intermediate = kwargs.pop("intermediate_tensors", None)
        if intermediate is not None:
            handover.take(intermediate.tensors)
        result = original(scheduler_output, intermediate, **kwargs)
        if isinstance(result, IntermediateTensors):  # of any but the last stage
            handover.hand_on(result.tensors, scheduler_output.total_num_scheduled_tokens)
        return result

    runner.execute_model = execute_model
