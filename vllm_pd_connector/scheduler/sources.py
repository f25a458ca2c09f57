"""Whose caches a decode request may load: from its parameters, which a user can write, to the source of its receive.

Parameters are refused that are not signed where they must be, that name an instance which must not be spoken to, or
that fit another prompt or model than the request's. Nothing here speaks to anybody.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.blocks import computes_itself, media_names, prompt_digest, transfer_params
from vllm_pd_connector.compat.conversations import is_text, prefix_digests
from vllm_pd_connector.compat.model.caches import decode_backoff, prefill_backoff
from vllm_pd_connector.errors import ProtocolError, UnauthenticatedPeer
from vllm_pd_connector.metadata import Either, PushFrom, ReadFrom
from vllm_pd_connector.protocol.params.answer import require_signature
from vllm_pd_connector.protocol.params.conversation import (
    Conversation,
    NamedConversation,
    is_named_alone,
    parse_conversation,
    parse_named,
)
from vllm_pd_connector.protocol.params.parse import RemotePrefill, pairing_name, parse_remote_prefill, unknown_fields
from vllm_pd_connector.protocol.peer import PeerKey
from vllm_pd_connector.protocol.push.registrations import ALIKE
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress, PrefillRef
from vllm_pd_connector.sidechannel.net.keys import keys_of, require_known_server

if TYPE_CHECKING:
    from vllm_pd_connector.compat.model.adapters import Adapters
    from vllm_pd_connector.compat.types import KVCacheConfig, Request, VllmConfig
    from vllm_pd_connector.config import Config
    from vllm_pd_connector.metadata import Source
    from vllm_pd_connector.protocol.params.bootstrap import HostPort

logger = init_logger(__name__)

MAX_IGNORED: Final = 64


class Sources:
    """See the module. `home` is where this instance's manifests are, None before they are served; `loads` and
    `prefills`: whether it takes such requests."""

    def __init__(self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, adapters: Adapters):
        self._names = adapters.name_of, media_names(vllm_config)
        self._ignored: set[str] = set()  # unknown fields of which it was said
        self.home: InstanceAddress | None = None
        self._config = config
        self.prefills = vllm_config.kv_transfer_config.is_kv_producer
        self.loads = bool(vllm_config.kv_transfer_config.is_kv_consumer)
        self._keys = keys_of(config)
        self._secret = config.secret()
        self._backoff = prefill_backoff(vllm_config, kv_cache_config)
        self._least = decode_backoff(vllm_config, kv_cache_config)

    def prefilled_tokens(self, request: Request) -> int:
        """How much of a request's prompt a prefill instance computes that drafts as this one does; the rest is for
        decode, 0 or less is nothing."""
        return int(request.num_prompt_tokens - self._backoff)

    def require_role(self) -> None:
        """Refuse decode requests where vLLM expects none: for consumers alone it keeps the blocks of an aborted request
        back while a step in flight may still write them, in place of what is received.

        Raises:
            ProtocolError: this instance only prefills.
        """
        if not self.loads:
            raise ProtocolError(
                "kv_role: kv_producer here, which loads nothing: send decode requests to a kv_consumer or kv_both"
            )

    def answer(self, request: Request) -> RemotePrefill:
        """The prefill instance's answer that a request brings.

        Raises:
            ProtocolError: it is none, an unauthenticated peer made it, or names an instance of an unauthenticated peer.
        """
        params = transfer_params(request)
        remote = parse_remote_prefill(params)
        self._require_trusted(remote)
        self._tell_ignored(params)
        return remote

    def are_here(self, engine_id: str) -> bool:
        """Whether caches of this engine are this one's own: no worker links itself, and vLLM finds them by itself."""
        return self.home is not None and engine_id == self.home.engine_id

    def require_own(self, remote: RemotePrefill) -> None:
        """Refuse what another instance has answered under this one's engine_id: it would be computed here in silence.
        Where a router sends both legs at once it names the place as it likes, and nobody can tell.

        Raises:
            ProtocolError: it tells another place than this instance's.
        """
        place, own = (remote.remote_host, remote.remote_port), self.home
        if own is not None and place != (own.host, own.port):
            raise ProtocolError(
                f"remote_engine_id: {remote.remote_engine_id} is this instance's own engine_id, which is at "
                f"{own.host}:{own.port}, and the prefill is at {place[0]}:{place[1]}: two instances have one engine_id "
                "in their --kv-transfer-config, give each its own; or this one was started anew at another address, "
                "send the prefill again"
            )

    def require_fit(self, request: Request, remote: RemotePrefill) -> None:
        """Refuse the answer for another prompt. How many groups there are follows from layouts, parallel sizes and a
        drafter, and may differ: caches are matched by layer.

        Raises:
            ProtocolError: what differs.
        """
        most = request.num_prompt_tokens - self._least
        loads = self.prefilled_tokens(request) > 0 and not computes_itself(request)
        if self._least and remote.remote_num_tokens > most and loads:
            raise ProtocolError(
                f"remote_num_tokens: {remote.remote_num_tokens} there, at most {most} here: this model's decode "
                f"computes the last {self._least} prompt token(s); run the same release on the prefill instance, "
                "with the same hybrid KV cache manager setting (another connector beside this one may have turned it "
                "off there)"
            )
        digest = prompt_digest(request, remote.remote_num_tokens, *self._names)
        if remote.remote_num_tokens > request.num_prompt_tokens or digest != remote.pd_connector.prompt_digest:
            raise ProtocolError(
                f"the prefilled prompt ({remote.remote_num_tokens} tokens, digest {remote.pd_connector.prompt_digest}) "
                f"is not this request's ({request.num_prompt_tokens} tokens, digest {digest}): send the decode request "
                f"with the same prompt, the kv_transfer_params that its own prefill returned, and {ALIKE}"
            )

    def named_conversation(self, request: Request) -> NamedConversation | None:
        """The name of the conversation that a prefill goes on with, if its parameters have nothing else of it.

        Raises:
            ProtocolError: it is none, names an unauthenticated peer, or this instance reads from no decode instance.
        """
        if not self._config.conversations:
            raise ProtocolError("conversations: not set here, so nothing is read from decode instances")
        if not self.prefills:  # its workers may be unable to read at all
            raise ProtocolError("kv_role: kv_consumer here: send turns to a prefill instance, which reads them")
        if not is_named_alone(params := transfer_params(request)):
            return None
        named = parse_named(params)
        self._require_known(named.remote_host, named.server_key)
        return named

    def conversation(self, params: object) -> Conversation:
        """What a decode instance has said that it holds of a conversation.

        Raises:
            ProtocolError: as `answer`.
        """
        remote = parse_conversation(params)
        self._require_trusted(remote)
        self._tell_ignored(params)
        return remote

    def common_prefix(self, request: Request, remote: Conversation) -> int:
        """How many tokens of a request's prompt can be read of what is held of its conversation: the longest of the
        named prefixes with which the prompt begins. At least one token is left to compute: a state that is read can
        only be advanced.

        Raises:
            ProtocolError: there is none, or this instance itself holds them.
        """
        if self.are_here(remote.remote_engine_id):
            raise ProtocolError(
                f"remote_engine_id: {remote.remote_engine_id} is this instance: what it holds is in its prefix cache"
            )
        prefixes = [entry for entry in remote.pd_connector.prefixes if entry[0] < request.num_prompt_tokens]
        if is_text(request):
            digests = prefix_digests(request, [tokens for tokens, _ in prefixes], *self._names)
            for (tokens, digest), own in reversed(list(zip(prefixes, digests, strict=True))):
                if digest == own:
                    return int(tokens)
        lengths = [tokens for tokens, _ in remote.pd_connector.prefixes]
        raise ProtocolError(
            f"the prompt ({request.num_prompt_tokens} tokens) goes on from none of the {len(lengths)} prefixes of "
            f"{lengths[0]} to {lengths[-1]} tokens that can be read: it has other tokens, media or adapter"
        )

    def finished(self, remote: RemotePrefill, *, shared: bool) -> ReadFrom | PushFrom | Either:
        """A prefill that has finished. The choices of a request with `n` > 1 share one (`shared`), and only one of them
        could be written for."""
        lease = remote.lease
        read = ReadFrom(remote.peer, remote.remote_engine_id, lease, remote.tables)
        if shared or not self._config.pushes:
            return read
        assert self.home is not None
        prefill = PrefillRef(lease.request_id, lease.nonce)
        push = PushFrom(read.peer, read.engine_id, prefill, self.home, remote.pd_connector.prompt_digest)
        return Either(read, push) if self._config.mode == "auto" else push

    def from_here(self, source: Source) -> Source:
        """A source as it is to be asked now: this instance may have slept since the request came, and is another."""
        if self.home is not None and isinstance(source, PushFrom):
            return replace(source, home=self.home)
        if self.home is not None and isinstance(source, Either):
            return replace(source, push=replace(source.push, home=self.home))
        return source

    def concurrent(self, request: Request, engine_id: str, place: HostPort) -> PushFrom:
        """A prefill that the router sends at the same time.

        Raises:
            ProtocolError: as `require_concurrent`.
        """
        assert self.home is not None
        self.require_concurrent(place.host)
        digest = prompt_digest(request, max(self.prefilled_tokens(request), 0), *self._names)
        return PushFrom(PeerKey(place.host, place.port, ""), engine_id, named(request), self.home, digest)

    def require_concurrent(self, host: str) -> None:
        """Refuse what a concurrent router cannot do: have parameters signed, or name a key.

        Raises:
            UnauthenticatedPeer: a secret or keys are configured, or the host is such a peer.
        """
        if self._secret is not None:
            raise UnauthenticatedPeer(
                "kv_transfer_params: a concurrent hand-off is not signed by the prefill instance, and params_secret is "
                "set here: use a router that waits for the prefill's answer"
            )
        self._require_known(host, None)

    def _require_trusted(self, remote: RemotePrefill) -> None:
        require_signature(remote, self._secret)
        self._require_known(remote.remote_host, remote.pd_connector.server_key)

    def _tell_ignored(self, params: Any) -> None:
        """Say once of each unknown field that it is, of `MAX_IGNORED` in all: users can write them."""
        for name in unknown_fields(params, RemotePrefill):
            if name not in self._ignored and len(self._ignored) < MAX_IGNORED:
                self._ignored.add(name)
                logger.warning("kv_transfer_params: %s is not known and ignored, since pd_connector is complete", name)

    def _require_known(self, host: str, server_key: str | None) -> None:
        require_known_server(host, server_key, self._keys, self._config.allow_unauthenticated_peers)


def named(request: Request) -> PrefillRef:
    """The prefill of a request whose two legs a router sends at once: by the name that both carry."""
    return PrefillRef(pairing_name(transfer_params(request), request.request_id), None)
