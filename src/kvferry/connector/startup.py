"""Starting a rank's agent and an engine's directory, from what vLLM says of the engine."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from pathlib import PurePath
from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvferry import __version__
from kvferry.agent.directory import Directory, RankEntry
from kvferry.agent.directory_server import DirectoryServer
from kvferry.agent.links import Identity
from kvferry.connector import compat
from kvferry.connector.cache_layout import check_given
from kvferry.connector.caches import Caches, Model, Table, Tensor, TokenOrder, describe_caches, layers_of
from kvferry.connector.facts import carried_groups
from kvferry.connector.launch import make_agent, recorder
from kvferry.connector.metadata import Handshake
from kvferry.host.facts import EngineFacts
from kvferry.host.settings import Settings
from kvferry.host.worker import FerryWorker
from kvferry.ids import Incarnation, Rank, peer_name
from kvferry.layout.spec import encode_spec

logger = logging.getLogger(__name__)


class WorkerStart:
    """What a rank needs to start once vLLM has made its KV caches."""

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, facts: EngineFacts, settings: Settings
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._facts = facts
        self._settings = settings

    def run(self, tensors: dict[str, Tensor]) -> tuple[FerryWorker, Handshake]:
        """Describe the caches, start the agent; the worker side and what the directory shall say of it.

        Raises:
            UsageError: the caches cannot be carried.
            TransportError: the transport could not be started.
        """
        facts, settings = self._facts, self._settings
        order = getattr(self._vllm_config.cache_config, "kv_cache_layout", None)
        check_given(settings.cache_layout, order)
        rank = Rank(get_pp_group().rank_in_group, get_tp_group().rank_in_group)
        caches = self._describe(tensors, rank)
        identity = Identity(facts.engine, _shared_incarnation(), rank)
        agent = make_agent(identity, caches.spec, settings)
        handshake = Handshake(
            engine=identity.engine,
            incarnation=identity.incarnation,
            pp=rank.pp,
            tp=rank.tp,
            metadata=agent.start(),
            cache=encode_spec(caches.spec),
            ends_with_engine=facts.ranks_end_with_engine,
        )
        if facts.produces and not facts.ranks_end_with_engine:
            logger.warning(
                "rank %s may outlive its engine (Ray, or several nodes): when %s dies, consumers keep their "
                "blocks until its write permission has run out, and not for a moment only",
                rank,
                identity.engine,
            )
        worker = FerryWorker(
            agent,
            rank=facts.index(rank),
            block_tokens=facts.block_tokens,
            group_tokens=tuple(table.block_tokens for table in facts.tables),
            ratios=caches.ratios,
            keeps_good_prefixes=facts.keeps_good_prefixes,
            drain_seconds=settings.drain_seconds,
            can_start_over=compat.can_fail_receives(),
            record=recorder(next(iter(tensors.values()))),
            moved=agent.moved,
        )
        if settings.corrupt_block is not None:
            logger.warning(
                "test hook: block %d of each prompt is damaged before it is pushed", settings.corrupt_block
            )
            worker.damage_block(settings.corrupt_block, lambda block: _damage(tensors, block, caches))
        logger.info(
            "rank %s of %s carries %d layers in order %s by %s",
            rank,
            identity.engine,
            len({plane.name for group in caches.spec.groups for plane in group.planes}),
            order or "of the engine",
            ", ".join(settings.backends),
        )
        return worker, handshake

    def _describe(self, tensors: dict[str, Tensor], rank: Rank) -> Caches:
        return describe_caches(
            tensors,
            model=_model(self._vllm_config, self._kv_cache_config),
            rank=rank,
            tp=self._facts.tp,
            pp=self._facts.pp,
            tables=self._tables(tensors),
            block_count=self._facts.block_count,
        )

    def _tables(self, tensors: dict[str, Tensor]) -> list[Table]:
        groups = carried_groups(self._kv_cache_config)
        layers = layers_of(tensors, [group.layers for group in groups])
        stages = _on_every_stage(layers)
        return [
            Table(
                layers=names,
                block_tokens=group.spec.block_size,
                window_tokens=group.window_tokens,
                order=_order(self._vllm_config, group.spec),
                stages=tuple(stage[number] for stage in stages),
            )
            for number, (group, names) in enumerate(zip(groups, layers, strict=True))
        ]


def open_directory(settings: Settings, handshakes: list[Handshake]) -> DirectoryServer:
    """Serve the ranks' descriptions on the side channel.

    Raises:
        UsageError: the port is taken or the address cannot be bound.
    """
    server = DirectoryServer(
        settings.side_channel_host,
        settings.side_channel_port,
        advertise_host=settings.advertise_host,
        secret=settings.side_channel_secret,
    )
    first = handshakes[0]
    server.publish(
        Directory(
            engine=first.engine,
            incarnation=first.incarnation,
            tp_size=1 + max(one.tp for one in handshakes),
            pp_size=1 + max(one.pp for one in handshakes),
            ranks=tuple(
                RankEntry(
                    pp=one.pp,
                    tp=one.tp,
                    peer=peer_name(one.engine, one.incarnation, Rank(one.pp, one.tp)),
                    metadata=one.metadata,
                    cache=one.cache,
                    ends_with_engine=one.ends_with_engine,
                )
                for one in handshakes
            ),
        )
    )
    logger.info("side channel of %s: %s port %d", first.engine, settings.advertise_host, server.port)
    return server


def _shared_incarnation() -> Incarnation:
    """One random id for all ranks of this engine: that of its first rank."""
    mine = secrets.token_hex(8)
    shared = get_tp_group().broadcast_object(get_pp_group().broadcast_object(mine, src=0), src=0)
    return Incarnation(str(shared))


def _on_every_stage(layers: list[tuple[str, ...]]) -> list[list[tuple[str, ...]]]:
    """The layers of each pipeline stage, by cache group; every rank takes part."""
    group = get_pp_group()
    return [list(group.broadcast_object(layers, src=stage)) for stage in range(group.world_size)]


def _model(vllm_config: Any, kv_cache_config: Any) -> Model:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    groups = carried_groups(kv_cache_config)
    speculative = vllm_config.speculative_config
    return Model(
        name=_model_name(model),
        dtype=_plain(model.dtype),
        kv_dtype=_plain(groups[0].spec.dtype) if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        kv_heads=model.get_total_num_kv_heads(),
        is_mla=bool(model.use_mla),
        facts={
            "model_revision": str(model.revision or ""),
            "quantization": str(model.quantization or ""),
            "speculative_config": "" if speculative is None else f"{speculative.method} {speculative.model}",
            "engine_version": compat.engine_version(),
            "kvferry_version": __version__,
            "max_model_len": str(model.max_model_len),
        },
    )


def _order(vllm_config: Any, spec: Any) -> TokenOrder:
    """What a block's bytes are, as far as is known of the attention kernel."""
    if vllm_config.device_config.device_type != "cpu" or vllm_config.model_config.use_mla:
        return "tokens"
    cache_dtype = vllm_config.cache_config.cache_dtype
    if compat.keeps_keys_transposed(
        vllm_config.model_config.dtype, spec.block_size, spec.head_size, cache_dtype
    ):
        return "transposed_keys"
    return "opaque"


def _model_name(model: Any) -> str:
    """The name's last part, because paths differ, and a digest of the configuration."""
    config = {key: value for key, value in model.hf_config.to_dict().items() if not key.startswith("_")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
    return f"{PurePath(str(model.model)).name}#{digest[:16]}"


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _damage(tensors: dict[str, Any], block: int, caches: Caches) -> None:
    ratio = caches.ratios[0]
    for name in caches.spec.tables[0][0].layers:
        tensors[name][block * ratio : (block + 1) * ratio].neg_()
