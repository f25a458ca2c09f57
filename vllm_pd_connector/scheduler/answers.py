"""What an instance answers of blocks that it holds: of a finished prefill, or of a conversation's finished turn."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.compat.blocks import media_names, prompt_digest
from vllm_pd_connector.protocol.params.conversation import Conversation, ConversationExtension, Prefix
from vllm_pd_connector.protocol.params.parse import Extension, RemotePrefill
from vllm_pd_connector.protocol.wire.messages import PROTOCOL_VERSION

if TYPE_CHECKING:
    from vllm_pd_connector.compat.types import Request, VllmConfig
    from vllm_pd_connector.config import Config
    from vllm_pd_connector.geometry.blocks import BlockTable
    from vllm_pd_connector.protocol.wire.fields import Weights
    from vllm_pd_connector.scheduler.epochs import Epochs
    from vllm_pd_connector.sidechannel.net.keys import Keys


class Answers:
    """Of one engine; `place` is where the side channel listens."""

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        engine_id: str,
        place: tuple[str, int],
        keys: Keys | None,
        epochs: Epochs,
    ):
        self._config = config
        self._names = epochs.adapters.name_of, media_names(vllm_config)
        parallel = vllm_config.parallel_config
        self._key = keys.public if keys is not None else None
        self._place = {
            "remote_engine_id": engine_id,
            "remote_host": place[0],
            "remote_port": place[1],
            "tp_size": parallel.tensor_parallel_size,
            "dcp_size": parallel.decode_context_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
            # A moment of this host's clock means nothing on another; the lease protocol replaces it.
            "remote_blocks_expiry_time": None,
            # By it routers learn whether they may send the next request's legs at once, by what this answer says.
            "transfer_mode": "push" if config.pushes and config.nameable else "pull",
        }

    def digest(self, request: Request, num_tokens: int) -> str:
        """Of a prefill of `num_tokens` tokens.

        Raises:
            ProtocolError: as `prompt_digest`.
        """
        return prompt_digest(request, num_tokens, *self._names)

    def prefill(
        self, request: Request, tables: tuple[BlockTable, ...], num_tokens: int, incarnation: str, weights: Weights
    ) -> RemotePrefill:
        """A finished prefill of `num_tokens` tokens in these blocks."""
        digest = self.digest(request, num_tokens)
        own = self._own(tables, digest, self._config.kv_lease_duration, incarnation, weights)
        return RemotePrefill(
            do_remote_prefill=True,
            do_remote_decode=False,
            pd_connector=Extension(**own),
            **self._blocks(request, tables, num_tokens),
        )

    def conversation(
        self,
        request: Request,
        tables: tuple[BlockTable, ...],
        prefixes: tuple[Prefix, ...],
        incarnation: str,
        weights: Weights,
    ) -> Conversation:
        """A finished turn, of which these prefixes can be read; the last is all that is held."""
        num_tokens, digest = prefixes[-1]
        own = self._own(tables, digest, self._config.conversation_lease, incarnation, weights)
        return Conversation(
            do_remote_prefill=False,
            do_remote_decode=True,
            pd_connector=ConversationExtension(prefixes=prefixes, **own),
            **self._blocks(request, tables, num_tokens),
        )

    def _blocks(self, request: Request, tables: tuple[BlockTable, ...], num_tokens: int) -> dict[str, Any]:
        """The in-tree fields."""
        return self._place | {
            "remote_block_ids": tuple(tuple(table.ids.tolist()) for table in tables),
            "remote_request_id": request.request_id,
            "remote_num_tokens": num_tokens,
        }

    def _own(
        self, tables: tuple[BlockTable, ...], digest: str, seconds: float, incarnation: str, weights: Weights
    ) -> dict[str, Any]:
        """The fields that are ours."""
        return {
            "version": PROTOCOL_VERSION,
            "incarnation": incarnation,
            "nonce": secrets.token_hex(16),
            "lease_seconds": seconds,
            "prompt_digest": digest,
            "first_blocks": tuple(table.first_block for table in tables),
            "server_key": self._key,
            "weights": weights,
        }
