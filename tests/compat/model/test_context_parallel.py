"""What workers and scheduler halves make of decode context parallelism, from vLLM's own specs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vllm_pd_connector.compat.model import layouts
from vllm_pd_connector.compat.model.caches import group_block_tokens, transfer_groups
from vllm_pd_connector.compat.model.facts import share_engine_id
from vllm_pd_connector.compat.model.layers import LayerFacts
from vllm_pd_connector.compat.model.layouts import align_interleave
from vllm_pd_connector.config import parse_config
from vllm_pd_connector.connector import EncodedManifest, PDConnector
from vllm_pd_connector.errors import InvalidConfig
from vllm_pd_connector.geometry.manifest import WHOLE, Group, GroupKind, TokenShare
from vllm_pd_connector.worker.half import _require_whole_checksums

FULL = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
LATENT = MLAAttentionSpec(block_size=48, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
DRAFT = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, dcp_sharded=False)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=64, dcp_sharded=False
)
STATE = MambaSpec(block_size=64, shapes=((3, 64),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
SHARE = TokenShare(1, 4, 16)


def config_of(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=groups)


def test_blocks_span_all_ranks_where_vllm_s_scheduler_has_them_do_so() -> None:
    config = config_of(FULL, LATENT, DRAFT, WINDOW, STATE)
    assert transfer_groups(config, SHARE) == (
        Group(GroupKind.FULL, 128, 9, share=SHARE),
        Group(GroupKind.FULL, 192, 9, share=SHARE),
        Group(GroupKind.FULL, 32, 9),
        Group(GroupKind.SLIDING_WINDOW, 16, 9, 64),
        Group(GroupKind.STATE, 64, 9),
    )
    tokens = group_block_tokens(config, 4)
    assert tokens == tuple(resolve_dcp_kv_block_size(group.kv_cache_spec, 4) for group in config.kv_cache_groups)
    assert [group.block_tokens for group in transfer_groups(config, SHARE)] == list(tokens)
    assert all(group.share == WHOLE for group in transfer_groups(config))


def parallel(dcp: int = 4, *, told: bool = False, former: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=2 if told else 1,
        dcp_kv_cache_interleave_size=former,
        _allow_auto_resolve_cp_interleave_size=not told,
    )


@pytest.mark.parametrize(
    ("given", "drafts", "interleave"),
    [
        (parallel(), None, 16),
        (parallel(dcp=1), None, 1),
        (parallel(told=True), None, 2),
        (parallel(former=4), None, 1),
        (parallel(), "eagle", 1),
    ],
    ids=["open", "no context parallelism", "told", "told by the former option", "with drafts"],
)
def test_ranks_hold_whole_blocks_in_turn_unless_the_operator_has_said_otherwise(
    given: SimpleNamespace, drafts: str | None, interleave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "layer_facts", lambda _: {"layer": LayerFacts("FLASH_ATTN_MLA", 1)})
    config: Any = SimpleNamespace(parallel_config=given, speculative_config=drafts)
    align_interleave(config, config_of(FULL, LATENT, STATE))
    assert given.cp_kv_cache_interleave_size == interleave


@pytest.mark.parametrize("backend", ["FLASHINFER_MLA", "DEEPSEEK_V32_INDEXER"])
def test_a_backend_that_takes_turns_with_every_token_keeps_that(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """And an indexer, of which the interleave is a constant where its model was compiled before."""
    facts = {"layer": LayerFacts("FLASH_ATTN_MLA", 1), "other": LayerFacts(backend, 1)}
    monkeypatch.setattr(layouts, "layer_facts", lambda _: facts)
    given = parallel()
    config: Any = SimpleNamespace(parallel_config=given, speculative_config=None)
    align_interleave(config, config_of(LATENT))
    assert given.cp_kv_cache_interleave_size == 1


def test_checksums_are_refused_where_ranks_hold_shares_of_the_tokens() -> None:
    manifest: Any = SimpleNamespace(groups=transfer_groups(config_of(FULL), SHARE))
    _require_whole_checksums(parse_config({}), manifest)
    with pytest.raises(InvalidConfig, match=r'verify: "all" here, but 4 .* set verify to "off"'):
        _require_whole_checksums(parse_config({"verify": "all"}), manifest)


def test_checksums_are_refused_where_all_pages_are_opaque_and_those_that_are_get_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, two = SimpleNamespace(pp_size=1), SimpleNamespace(pp_size=2)
    known = SimpleNamespace(layer="model.layers.0", opaque="")
    packed = SimpleNamespace(layer="model.layers.1", opaque="TURBOQUANT uint8 packed")
    groups = transfer_groups(config_of(FULL), WHOLE)
    every = parse_config({"verify": "all"})
    for tensors, stages, told in (
        ([known], one, ""),
        ([known, packed], one, "compares 1 of 2 caches: pages of model.layers.1 (TURBOQUANT"),
        ([packed], two, "compares 0 of 1 caches"),
    ):
        caplog.clear()
        manifest: Any = SimpleNamespace(groups=groups, tensors=tensors, parallel=stages)
        _require_whole_checksums(every, manifest)
        assert told in caplog.text and bool(told) is bool(caplog.text)
    manifest = SimpleNamespace(groups=groups, tensors=[packed], parallel=one)
    _require_whole_checksums(parse_config({}), manifest)
    with pytest.raises(InvalidConfig, match=r'the pages of all 1 caches are moved as opaque .*; set verify to "off"'):
        _require_whole_checksums(every, manifest)


def test_ranks_that_vllm_cannot_tell_apart_are_all_served_in_their_order() -> None:
    """Two prefill-context ranks of two tensor ranks: vLLM keeps one entry for each tensor rank."""
    ranks = [(0, 0), (0, 1), (1, 0), (1, 1)]
    one = {place: EncodedManifest(bytes(place), bytes(1)) for place in ranks}
    kept = {
        (0, rank): EncodedManifest(one[1, rank].manifest, bytes(1), (one[0, rank], one[1, rank])) for rank in (0, 1)
    }
    served: list[list[bytes]] = []
    connector: Any = object.__new__(PDConnector)
    connector._scheduler = SimpleNamespace(serve=lambda manifests, tokens, weights: served.append(manifests))
    connector.set_xfer_handshake_metadata_pp_aware(kept)
    assert served == [[bytes(place) for place in ranks]]


def test_ranks_that_a_later_vllm_tells_by_three_numbers_are_served_or_refused() -> None:
    """Pipeline stage, prefill-context rank, tensor rank."""
    served: list[list[bytes]] = []
    connector: Any = object.__new__(PDConnector)
    connector._scheduler = SimpleNamespace(serve=lambda manifests, tokens, weights: served.append(manifests))
    told: dict[Any, Any] = {(0, 0, rank): EncodedManifest(bytes([rank]), bytes(1)) for rank in (1, 0)}
    connector.set_xfer_handshake_metadata_pp_aware(told)
    assert served == [[b"\0", b"\1"]]
    with pytest.raises(InvalidConfig, match=r"tells the workers apart by \(0, 1, 0\)"):
        connector.set_xfer_handshake_metadata_pp_aware(told | {(0, 1, 0): EncodedManifest(b"\2", bytes(1))})


@pytest.mark.parametrize("ranks", [1, 2])
def test_prefill_context_ranks_of_another_node_take_the_first_one_s_engine_id(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `vllm serve` draws one, and the workers of an instance must name one."""
    group = SimpleNamespace(broadcast_object=lambda own, src: f"of rank {src}, not {own}")
    monkeypatch.setattr("vllm.distributed.parallel_state.get_pcp_group", lambda: group)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(prefill_context_parallel_size=ranks),
        kv_transfer_config=SimpleNamespace(engine_id="own"),
    )
    share_engine_id(config)
    assert config.kv_transfer_config.engine_id == ("own" if ranks == 1 else "of rank 0, not own")
