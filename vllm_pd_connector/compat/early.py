"""Refuse a configuration when vLLM has read it, before anything is loaded.

vLLM asks a connector nothing until the weights are there, so its two configuration objects are followed: the one of
`--kv-transfer-config`, made while the command line is parsed, and the first whole configuration that contains that very
object, made before the engines are started (one of each connector in a MultiConnector is made in between). Both are
plain dataclasses of which the method that vLLM runs after the fields are set is wrapped. In a process that neither
parses nor starts engines nothing is asked: there the object was unpickled, and its ports may be taken by the engine
that asks. What vLLM has concluded wrongly from the connector's role is put right there, in every process, and in those
of API servers the connector is told of what they refuse (`refused`).

Source: vLLM 0.32 and 0.33, `config/kv_transfer.py` (`KVTransferConfig.__post_init__`), `config/vllm.py`
(`VllmConfig.__post_init__`), `engine/arg_utils.py` (`parse_dataclass`), `config/parallel.py`.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.compat.factory import adopt_vllm_logging
from vllm_pd_connector.compat.refused import tell_of_refused_streams
from vllm_pd_connector.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, MutableMapping

    from vllm_pd_connector.compat.types import VllmConfig

    Document = Mapping[str, Any]


_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"


class RefusedStart(InvalidConfig, argparse.ArgumentTypeError, SystemExit):
    """An instance that cannot start as it is configured.

    For who builds an engine in a program it is an `InvalidConfig`. A command line's parser prints an
    `ArgumentTypeError` as one line, and a `SystemExit` that nobody catches ends the process with its text alone.
    """

    def __init__(self, problems: Iterable[str]):
        self.code = f"PDConnector cannot start: {'; '.join(problems)}"
        super().__init__(self.code)


def check_early(
    settings: Callable[[Document], list[str]],
    ports: Callable[[Document, Iterable[int]], list[str]],
    extras: Callable[[Document], list[Any]],
) -> None:
    """Ask for the problems of every configuration that this process makes from now on; once per process.

    Args:
        settings: given the keys of a `--kv-transfer-config`.
        ports: given the same, and the data-parallel indices of the engines that are to be started.
        extras: the `kv_connector_extra_config` of each PDConnector in such a configuration.
    """
    from vllm.config import KVTransferConfig, VllmConfig

    if hasattr(KVTransferConfig.__post_init__, "__wrapped__"):
        return
    parsed: list[tuple[weakref.ref[Any], Document]] = []

    def on_transfer(made: Any) -> None:
        document = _document(made)
        if document["kv_role"] is None:
            return
        _refuse(settings(document))
        parsed[:] = [*((one, said) for one, said in parsed if one() is not None), (weakref.ref(made), document)]

    def on_whole(made: Any) -> None:
        transfer = made.kv_transfer_config
        if transfer is None:
            return
        asked = [said for one, said in parsed if one() is transfer]
        parsed[:] = [(one, said) for one, said in parsed if one() is not transfer]
        for said in asked:
            _refuse(_replaced(said, transfer.kv_connector) if extras(said) else [])
            _refuse(ports(_document(transfer), _engines(made.parallel_config)))
            _refuse(_unserved(made, extras(said)))
        if found := extras(_document(transfer)):
            tell_of_refused_streams()
            _tell_ray_s_workers(found, made, os.environ)
            if _lacks_embeddings(made):
                _require_embeddings(made.model_config.multimodal_config)

    _after(KVTransferConfig, on_transfer)
    _after(VllmConfig, on_whole)


def _document(transfer: Any) -> Document:
    keys = ("kv_connector", "kv_role", "engine_id", "kv_connector_module_path", "kv_connector_extra_config")
    return {key: getattr(transfer, key) for key in keys}


def _replaced(said: Document, connector: str) -> list[str]:
    """Whether vLLM has put another connector in the place of the one that its command line named, or of those in it.

    Source: vLLM 0.32, `VllmConfig._post_init_kv_transfer_config`, which does so without a word.
    """
    if connector == said["kv_connector"]:
        return []
    taken = f"--kv-offloading-size puts {connector} in the place of {said['kv_connector']}, and nothing is handed over"
    return [f"{taken}: leave it out, and put {connector} behind PDConnector in a MultiConnector"]


def _unserved(made: Any, extras: list[Any]) -> list[str]:
    """What this vLLM is to do that the connector cannot serve; each engine would say so when its weights are there. The
    buffers' device is not asked for within a MultiConnector, which gives each connector that of its own entry."""
    from vllm_pd_connector.compat.model.served import require_served, require_served_device, require_whole_shares

    try:
        for extra in extras:
            require_whole_shares(extra.get("verify", "off"), made.parallel_config.decode_context_parallel_size)
        if extras and made.model_config is not None:
            require_served(made)
            if made.kv_transfer_config.kv_connector != "MultiConnector":
                require_served_device(made)
    except InvalidConfig as error:
        return [str(error)]
    return []


def take_ray_s_address(config: VllmConfig, environ: MutableMapping[str, str]) -> None:
    """For a worker of an engine that Ray places: take the node's address for the side channel's, as that engine does.
    It is in a variable that Ray's executor withholds from workers. With workers on several nodes (`span`) it is right
    for those on the engine's own.

    Source: vLLM 0.32, `EngineCoreActorMixin._set_nixl_side_channel_host`, `v1/executor/ray_utils.py`.
    """
    ray = sys.modules.get("ray")  # whose actor this process is
    if config.parallel_config.data_parallel_backend == "ray" and ray is not None:
        environ.setdefault(_HOST, ray.util.get_node_ip_address())


def _tell_ray_s_workers(extras: list[Any], made: Any, environ: Mapping[str, str]) -> None:
    """Write into the configuration at which address this instance's side channel listens. Ray's executor copies the
    environment to its workers without that variable, and they would take their own for it. Engines that Ray places
    each have their own.

    Source: vLLM 0.32, `v1/executor/ray_utils.py` (`WORKER_SPECIFIC_ENV_VARS`).
    """
    host = environ.get(_HOST)
    if not host:
        return
    parallel = made.parallel_config
    if parallel.distributed_executor_backend == "ray" and parallel.data_parallel_backend != "ray":
        for extra in extras:
            if extra.get("side_channel_host") is None:
                extra["side_channel_host"] = host


def _lacks_embeddings(made: Any) -> bool:
    """Whether clients may leave the embeddings of media out here, and no EC connector brings them."""
    media = getattr(made.model_config, "multimodal_config", None)
    encoded = made.ec_transfer_config
    return media is not None and media.allow_missing_mm_embeddings and not (encoded and encoded.is_ec_consumer)


def _require_embeddings(media: Any) -> None:
    """Have the API server refuse media whose embeddings a client has left out.

    vLLM takes them for needless where caches are received. But decode computes a prompt itself now and then (a request
    without a prefill, another policy for failed loads, new weights, preemption), and an encoder without input ends the
    engine core.

    Source: vLLM 0.32, `VllmConfig._resolve_mm_embedding_inputs`, `sanity_check_mm_encoder_outputs`;
    `MultiModalDataParser.embedding_field_sets`, which reads this when the API server is there.
    """
    from vllm.logger import init_logger

    media.allow_missing_mm_embeddings = False
    adopt_vllm_logging()
    init_logger(__name__).info_once(
        "pre-computed embeddings of media must not be left out after all: decode may have to compute their prompt"
    )


def _engines(parallel: Any) -> range:
    """Data-parallel indices of the engines that this `vllm serve` starts on this machine; none where it is an API
    server alone, Ray places them, or this node of several runs workers of an engine that is on another."""
    first, count = int(parallel.data_parallel_index), int(parallel.data_parallel_size_local)
    if count == 0 or parallel.data_parallel_backend == "ray" or parallel.node_rank_within_dp > 0:
        return range(0)
    return range(first, first + count)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise RefusedStart(problems)


def _after(kind: type, then: Callable[[Any], None]) -> None:
    """Have `then` called with every object of this kind, when vLLM has checked it itself."""
    checked = kind.__post_init__  # type: ignore[attr-defined]  # vLLM ships no types

    @functools.wraps(checked)
    def post_init(made: Any, *args: Any) -> None:
        checked(made, *args)
        then(made)

    kind.__post_init__ = post_init  # type: ignore[attr-defined]
