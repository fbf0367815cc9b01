"""Hands new weights to all engine cores of one engine, or to none, in two phases.

Runs in: the API server. Each core prepares its ranks before the first core loads; after that only
vLLM's own loading can fail, and then no core serves until a whole set has come. A manifest is for
the epoch of the first core, and names the GPUs of all ranks: each core is given it as its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from clairai.errors import (
    ClairaiError,
    CoresDifferError,
    WeightsError,
    WeightsTornError,
    make_error,
)
from clairai.weights.manifest import Manifest, encode_manifest, kind_of, parse_manifest
from clairai.wire import weights_messages
from clairai.wire.control_messages import Control, ControlReply
from clairai.wire.ring_messages import Refusal

CallCore = Callable[[bytes], Awaitable[list[bytes]]]
_DECODER: Final = msgspec.msgpack.Decoder(ControlReply)


class CoreWeights:
    """`calls` reach the engine cores, in the order of their numbers."""

    def __init__(self, calls: Sequence[CallCore]) -> None:
        self._calls = calls

    async def answer(self, control: weights_messages.WeightsControl) -> ControlReply:
        """The reply of all cores to what commits nothing; raises what one of them refuses."""
        count = len(self._calls)
        match control:
            case weights_messages.DescribeWeights():
                return await self.describe()
            case weights_messages.ListTensors():
                return decode_reply((await self._calls[0](msgspec.msgpack.encode(control)))[0])
            case weights_messages.PlanWeights(manifest):
                return await self.plan(manifest)
            case _:
                _, own = await self._for_each_core(control.manifest)
                kind = type(control)
                return (await self._ask_all([kind(one, num_cores=count) for one in own]))[0]

    async def describe(self) -> weights_messages.WeightsState:
        """The state of the first core, with the ranks of all."""
        states = await self._ask_states()
        return msgspec.structs.replace(
            states[0],
            devices=tuple(device for state in states for device in state.devices),
            ranks=tuple(rank for state in states for rank in state.ranks),
            is_torn=any(state.is_torn for state in states),
        )

    async def plan(self, raw: bytes) -> ControlReply:
        """Checked first, so that a plan that one core refuses replaces none of another sender."""
        _, own = await self._for_each_core(raw)
        count = len(own)
        await self._ask_all([weights_messages.CheckWeights(one, num_cores=count) for one in own])
        planned = [weights_messages.PlanWeights(one, num_cores=count) for one in own]
        return (await self._ask_all(planned))[0]

    async def commit(self, raw: bytes, *, is_begun: bool) -> ControlReply:
        """Have all cores serve with what has come, or none; nobody else may change them meanwhile.

        `is_begun`: a caller of vLLM's has begun the update, pauses the engine and ends the update.
        """
        manifest, own = await self._for_each_core(raw)
        count, transfer = len(own), manifest.transfer
        if not is_begun:
            await self._ask_all([weights_messages.CheckIdle(one) for one in own])
        try:
            await self._ask_all(
                [weights_messages.PrepareWeights(one, num_cores=count) for one in own]
            )
        except ClairaiError:
            await self._ask_each([weights_messages.AbandonWeights(transfer)] * count)
            raise
        apply = weights_messages.ApplyWeights(transfer, is_begun)
        loaded = await self._require_loaded(await self._ask_each([apply] * count))
        if all(kind_of(tensor.name) == "model" for tensor in manifest.tensors):
            return loaded
        installed = await self._ask_each([weights_messages.InstallBanks(transfer)] * count)
        return _require_alike(installed)

    async def end_update(self) -> None:
        """End the update that a caller of vLLM's has begun: what it sent was refused."""
        end = weights_messages.AbandonWeights("", is_begun=True)
        await self._ask_each([end] * len(self._calls))

    async def _require_loaded(
        self, replies: Sequence[ControlReply]
    ) -> weights_messages.WeightsCommitted:
        torn = weights_messages.describe_torn(replies, "engine cores", WeightsTornError.code)
        if torn is not None:
            tear = weights_messages.TearWeights.after(await self._ask_states())
            await self._ask_each([tear] * len(self._calls))
            raise WeightsTornError(torn)
        _raise_refusal(replies)
        loaded = replies[0]
        assert isinstance(loaded, weights_messages.WeightsCommitted)
        return loaded

    async def _for_each_core(self, raw: bytes) -> tuple[Manifest, list[bytes]]:
        """The manifest, and as each core takes it; beside the event loop, for it may be long."""
        states = await self._ask_states()
        manifest = await asyncio.to_thread(parse_manifest, raw)
        return manifest, await asyncio.to_thread(split_manifest, manifest, states)

    async def _ask_states(self) -> list[weights_messages.WeightsState]:
        replies = await self._ask_all([weights_messages.DescribeWeights()] * len(self._calls))
        states = [one for one in replies if isinstance(one, weights_messages.WeightsState)]
        assert len(states) == len(self._calls)
        return states

    async def _ask_all(self, controls: Sequence[Control]) -> list[ControlReply]:
        """The replies; raises the first refusal."""
        replies = await self._ask_each(controls)
        _raise_refusal(replies)
        return replies

    async def _ask_each(self, controls: Sequence[Control]) -> list[ControlReply]:
        """Ask all cores at the same time; the reply of each, in their order."""
        encoded = [msgspec.msgpack.encode(control) for control in controls]
        asked = [call(message) for call, message in zip(self._calls, encoded, strict=True)]
        # All have replied before anything follows: a core that raises hides no other's reply.
        found = await asyncio.gather(*asked, return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [decode_reply(one[0]) for one in found if not isinstance(one, BaseException)]


def split_manifest(
    manifest: Manifest, states: Sequence[weights_messages.WeightsState]
) -> list[bytes]:
    """The manifest as each core takes it: for its own epoch, with the GPUs of its own ranks.

    One that is for another engine stays as it is, and is refused for that by the first core.
    """
    if manifest.epoch != states[0].epoch:
        return [encode_manifest(manifest)] * len(states)
    found, devices = [], manifest.device
    num_ranks = sum(len(state.devices) for state in states)
    if not isinstance(devices, str) and len(devices) != num_ranks:
        raise WeightsError(
            f"buffers for {len(devices)} ranks, and the engine has {num_ranks}; ask it again"
        )
    for state in states:
        own = devices
        if not isinstance(devices, str):
            own, devices = devices[: len(state.devices)], devices[len(state.devices) :]
        found.append(
            encode_manifest(msgspec.structs.replace(manifest, epoch=state.epoch, device=own))
        )
    return found


def decode_reply(reply: bytes) -> ControlReply:
    decoded: ControlReply = _DECODER.decode(reply)
    return decoded


def _raise_refusal(replies: Sequence[ControlReply]) -> None:
    for core, reply in enumerate(replies):
        if isinstance(reply, Refusal):
            where = f"engine core {core}: " if core else ""
            raise make_error(reply.code, f"{where}{reply.reason}")


def _require_alike(replies: Sequence[ControlReply]) -> ControlReply:
    """The reply of the first core, if all have the same probes and vectors now."""
    found = {
        (one.version, one.bank_version, one.vectors_version)
        for one in replies
        if isinstance(one, weights_messages.WeightsCommitted)
    }
    refused = [one.reason for one in replies if isinstance(one, Refusal)]
    if refused or len(found) != 1:
        versions = sorted(found, key=str)
        raise CoresDifferError(
            f"a change reached some engine cores and not all (versions {versions}"
            f"{''.join(f'; {reason}' for reason in refused)}): rows still name the probes they "
            f"were scored with; restart the engine before the next change"
        )
    return replies[0]
