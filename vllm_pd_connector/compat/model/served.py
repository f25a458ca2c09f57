"""What vLLM can be told to do beside this connector and that it cannot serve: refused, with what to do instead.

An instance is refused when vLLM has concluded its whole configuration, before anything is loaded (`compat.early`), and
each of its connectors asks once more: engines are also built by programs that made their configuration elsewhere.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import FOLLOWS_SLEEP
from vllm_pd_connector.compat.model.facts import vllm_version
from vllm_pd_connector.config import expandable_segments, require_ids_of_their_own
from vllm_pd_connector.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_pd_connector.compat.types import VllmConfig


def require_served(config: VllmConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse what this connector cannot serve beside whatever other connectors; `require_served_device` is of its own
    entry.

    Raises:
        InvalidConfig: the first of the reasons below.
    """
    require_lasting_memory(config, environ)
    require_caches_alone(config)
    require_prefills_that_end(config)
    require_steps_that_succeed(config)
    require_ids_of_their_own(environ)


def require_whole_shares(verify: str, size: int) -> None:
    """Checksums fold all tokens of a request into one number, which ranks with a share of them cannot make.

    Raises:
        InvalidConfig: receives are to be verified, and `size` decode-context parallel ranks interleave tokens.
    """
    if verify != "off" and size > 1:
        raise InvalidConfig(
            f'verify: "{verify}" here, but {size} decode-context parallel ranks hold the tokens in turns, whose '
            'checksums this version cannot compare; set verify to "off", or --decode-context-parallel-size to 1'
        )


def require_lasting_memory(config: VllmConfig, environ: Mapping[str, str]) -> None:
    """Refuse vLLM's sleep mode where nobody tells when: an engine that wakes up has its caches in other memory under
    the same addresses, and what a transport registered before still names the former. And PyTorch's expandable
    segments, whose memory moves likewise: vLLM refuses them for every connector, by one of three names alone.

    Raises:
        InvalidConfig: sleep mode is enabled, and this vLLM does not tell; or the segments are, for vLLM's caches.

    Source: vLLM 0.32, `GPUWorker.sleep`, `VllmConfig._verify_kv_transfer_compat`, `device_allocator/alloc_conf.py`;
    0.33 asks `supports_sleep_mode` and calls `unregister_kv_caches` and `restore_kv_caches`.
    """
    name = expandable_segments(environ)
    if name and not config.model_config.enable_cumem_allocator:  # which has a pool without them for the caches
        raise InvalidConfig(
            f"{name}: expandable_segments:True lets the caches' memory move while transports have it "
            "registered, as vLLM says of PYTORCH_CUDA_ALLOC_CONF; leave it out, or serve with --enable-cumem-allocator"
        )
    if config.model_config.enable_sleep_mode and not FOLLOWS_SLEEP:
        raise InvalidConfig(
            f"enable_sleep_mode: an engine of vLLM {vllm_version()} that sleeps gives the caches' memory away without "
            "a word, while transports have it registered, and other caches would be read and written after it; serve "
            "without --enable-sleep-mode, or with vLLM 0.33 or later"
        )


def require_caches_alone(config: VllmConfig) -> None:
    """Refuse what vLLM keeps of a prompt beside its caches: nobody moves that, and decode goes on without it.

    A pruned video's positions come with its embeddings, which decode does not compute: it would rotate what it computes
    by those of the whole video. Experts that tokens were routed to are asked of a store by their blocks: it has none of
    what was received, and ends the engine. vLLM refuses the latter for its own connectors, by their names.

    Raises:
        InvalidConfig: one of them is enabled.

    Source: vLLM 0.32, `Qwen2_5_VLForConditionalGeneration.recompute_mrope_positions`, `MultiModalPruner`;
    `VllmConfig._verify_aux_output_compatibility`, `AuxOutputWorkerConnector._commit_output`.
    """
    if getattr(getattr(config, "aux_output_config", None), "enable_return_routed_experts", False):
        raise InvalidConfig(
            "enable_return_routed_experts: the experts of a prompt's tokens are known where it was computed, and "
            "PDConnector moves caches alone; serve without --enable-return-routed-experts"
        )
    media = getattr(config.model_config, "multimodal_config", None)
    if media is not None and media.is_multimodal_pruning_enabled() and config.model_config.uses_mrope:
        raise InvalidConfig(
            f"video_pruning_rate is {media.video_pruning_rate}: which tokens of a video are left, and so the positions "
            "of all behind them, is known where it was computed, and PDConnector moves caches alone; serve without "
            "--video-pruning-rate"
        )


def require_prefills_that_end(config: VllmConfig) -> None:
    """Refuse diffusion models, on either side: a prefill of one token computes a whole canvas behind the prompt, and
    its windows have let go of what decode needs of the prompt then.

    Raises:
        InvalidConfig: the model is one.

    Source: vLLM 0.32, `ModelConfig.is_diffusion`, `vllm/config/diffusion.py`, `models/diffusion_gemma.py`.
    """
    if config.model_config.is_diffusion:
        raise InvalidConfig(
            "model: a diffusion model computes a whole canvas behind its prompt, so no prefill ends where the prompt "
            "does, as one for PDConnector must; serve it without PDConnector"
        )


def require_steps_that_succeed(config: VllmConfig) -> None:
    """Refuse engines that outlive a step of theirs that has failed: what that was to tell the workers, or they of it,
    is lost, and vLLM waits for a report of each receive before it frees the blocks.

    Raises:
        InvalidConfig: fault tolerance is enabled.

    Source: vLLM 0.32, `EngineCoreSentinel.on_fault`, which clears the batch queue; `KVConnector.pre_forward` of the
    newer runner, whose `post_forward` a forward that raises does not reach.
    """
    if getattr(config.parallel_config, "enable_fault_tolerance", False):
        raise InvalidConfig(
            "enable_fault_tolerance: an engine that goes on after a step has failed has lost what that step was to "
            "tell of receives, and would keep their blocks for good; serve without --enable-fault-tolerance"
        )


SERVED_DEVICES = ("cpu", "cuda")
"""Types of devices, as torch names them: cuda is a GPU of NVIDIA or AMD."""


def require_served_device(config: VllmConfig) -> None:
    """Refuse caches on devices that no transport here reaches, and buffers that nobody would use.

    vLLM's own connector moves the caches of some devices by way of host memory (`kv_buffer_device: cpu`); this one
    moves them between where they lie.

    Raises:
        InvalidConfig: vLLM's platform has neither CPUs nor CUDA devices, or buffers are asked for elsewhere.

    Source: vLLM 0.32, `KVTransferConfig.kv_buffer_device`, `_NIXL_SUPPORTED_DEVICE` of its NIXL connector.
    """
    from vllm.platforms import current_platform

    device, asked = str(current_platform.device_type), str(config.kv_transfer_config.kv_buffer_device)
    if device not in SERVED_DEVICES:
        raise InvalidConfig(
            f"vLLM's platform has its caches on {device} devices, and PDConnector serves those on "
            f"{' and '.join(SERVED_DEVICES)} only; use vLLM's NixlConnector there"
        )
    if asked != device:
        raise InvalidConfig(
            f"kv_buffer_device is {asked}, and the caches are on {device}: PDConnector moves them from where they lie "
            "and has no buffers elsewhere; leave kv_buffer_device out"
        )
