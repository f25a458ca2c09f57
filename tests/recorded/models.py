"""Published models by the figures that decide their caches, and the ways in which each is served on GPUs.

Figures are those of the models' config.json. A model is a pattern of layers; layers that are alike stand for all of
their kind, `layers` says how many the model has. A `Setup` is what an operator or vLLM chooses: attention backends by
kind of layer, the device they ask for, layout, cache dtype, block size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Attention:
    """K and V of `heads` heads in the whole model; `window` or `chunk` tokens are looked at, or all."""

    heads: int
    size: int
    value_size: int = 0
    window: int = 0
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """MLA: one vector of `size` elements a token."""

    size: int = 576
    window: int = 0


@dataclass(frozen=True, slots=True)
class Index:
    """The keys of a sparse-attention indexer, `size` elements; one for `pool` tokens. `owner` is the kind of model."""

    owner: str
    size: int = 128
    pool: int = 1


@dataclass(frozen=True, slots=True)
class Tail:
    """GLM-5-Next: the raw keys and scores of the pool that is not full yet."""

    size: int = 128
    pool: int = 4


@dataclass(frozen=True, slots=True)
class V4:
    """DeepSeek-V4: `part` is main, window, index, or the state of the compressor of main or index."""

    part: str
    ratio: int = 4


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent layer: `kind` names vLLM's shape function, `dims` are its arguments without the ranks."""

    kind: str
    dims: tuple[int, ...]
    groups: int = 0


Layer = Attention | Latent | Index | Tail | V4 | State


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is served. `capability` is the device's compute capability, 90 for Hopper, 100 for Blackwell."""

    name: str
    backend: str
    capability: int = 90
    layout: str = "LBHNC"
    dtype: str = "auto"
    block: int = 16
    tp: tuple[int, ...] = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Model:
    """`pattern` is one repetition of the layers, each with its caches. `heads` is what the model states for itself; its
    configuration states those of each layer if `per_layer`."""

    name: str
    architecture: str
    layers: int
    heads: int
    pattern: tuple[tuple[Layer, ...], ...]
    setups: tuple[Setup, ...]
    per_layer: bool = False

    @property
    def recorded(self) -> int:
        """Repetitions that are recorded: two of a short pattern, so that layers lie beside their like."""
        return 2 if len(self.pattern) < 3 else 1


NHD = Setup("FA NHD", "FLASH_ATTN", layout="LBNHC")
HND = Setup("FA HND", "FLASH_ATTN")
BLACKWELL = Setup("FlashInfer HND", "FLASHINFER", 100)
PACKED = Setup("FA BLNHC", "FLASH_ATTN", layout="BLNHC", tp=(2, 4))
PLAIN = (NHD, HND, replace(BLACKWELL, tp=(2, 8)), PACKED)
EVERY = (
    *PLAIN,
    Setup("FA HND 64", "FLASH_ATTN", block=64, tp=(1, 4)),
    Setup("FA BHLNC", "FLASH_ATTN", layout="BHLNC", tp=(2, 4)),
    Setup("FA LHBNC", "FLASH_ATTN", layout="LHBNC", tp=(2,)),
    Setup("FA BLHNC", "FLASH_ATTN", layout="BLHNC", tp=(2,)),
    Setup("Flex HND", "FLEX_ATTENTION", tp=(2,)),
    Setup("FA fp8", "FLASH_ATTN", dtype="fp8", tp=(2, 4)),
    Setup("FlashInfer fp8", "FLASHINFER", 100, dtype="fp8", tp=(2, 4)),
    Setup("Triton int8/head", "TRITON_ATTN", dtype="int8_per_token_head", tp=(2, 4)),
    Setup("Triton fp8/head NHD", "TRITON_ATTN", layout="LBNHC", dtype="fp8_per_token_head", tp=(2, 4)),
    Setup("Triton int4/head", "TRITON_ATTN", dtype="int4_per_token_head", tp=(2, 4)),
    Setup("FlashInfer NVFP4", "FLASHINFER", 100, dtype="nvfp4", tp=(2, 4)),
    Setup("FlashInfer NVFP4, Hopper", "FLASHINFER", dtype="nvfp4", tp=(2, 4)),
    Setup("FlashInfer NVFP4 NHD, SM120", "FLASHINFER", 120, layout="LBNHC", dtype="nvfp4", block=32, tp=(2, 8)),
    Setup("TurboQuant", "TURBOQUANT", layout="LBNHC", dtype="turboquant_k8v4", tp=(2, 4)),
    Setup("HPC NHD", "HPC_ATTN", layout="LBNHC", block=64, tp=(2, 4)),
    Setup("B12X", "B12X", 120, dtype="auto", block=64, tp=(2, 4)),
)
MLA = (
    Setup("FlashMLA", "FLASHMLA", block=64),
    Setup("Cutlass MLA", "CUTLASS_MLA", 100, block=128, tp=(2, 8)),
    Setup("FlashMLA 256", "FLASHMLA", block=256, tp=(4,)),
    Setup("FA MLA", "FLASH_ATTN_MLA", tp=(4,)),
    Setup("FlashInfer MLA packed", "FLASHINFER_MLA", 100, layout="BLNHC", block=64, tp=(4,)),
    Setup("FlashMLA fp8", "FLASHMLA", dtype="fp8", block=64, tp=(4, 8)),
    Setup("Cutlass MLA fp8", "CUTLASS_MLA", 100, dtype="fp8", block=128, tp=(2, 4)),
    Setup("FlashInfer MLA fp8", "FLASHINFER_MLA", 100, dtype="fp8", block=64, tp=(4,)),
    Setup("TokenSpeed fp8", "TOKENSPEED_MLA", 100, dtype="fp8", block=32, tp=(4,)),
    Setup("Triton MLA int8/token", "TRITON_MLA", dtype="int8_per_token_head", tp=(2, 4)),
)
DSA = (
    Setup("FlashMLA sparse fp8_ds_mla, Hopper", "FLASHMLA_SPARSE", dtype="fp8_ds_mla", block=64),
    Setup("FlashMLA sparse fp8_ds_mla, Blackwell", "FLASHMLA_SPARSE", 100, dtype="fp8_ds_mla", block=128, tp=(2, 8)),
    Setup("FlashInfer sparse fp8_ds_mla, SM120", "FLASHINFER_MLA_SPARSE_SM120", 120, dtype="fp8_ds_mla", block=64,
          tp=(4,)),
    Setup("FlashMLA sparse nvfp4_ds_mla", "FLASHMLA_SPARSE", 100, dtype="nvfp4_ds_mla", block=64, tp=(4, 8)),
    Setup("FlashInfer sparse fp8", "FLASHINFER_MLA_SPARSE", 100, dtype="fp8", block=64, tp=(4, 8)),
    Setup("FlashMLA sparse bf16, Hopper", "FLASHMLA_SPARSE", block=64, tp=(4, 8)),
    Setup("FA sparse bf16, Hopper", "FLASH_ATTN_MLA_SPARSE", block=64, tp=(8,)),
    Setup("FlashMLA sparse fp8_ds_mla packed", "FLASHMLA_SPARSE", dtype="fp8_ds_mla", layout="BLNHC", block=64,
          tp=(4,)),
)  # fmt: skip
V4_SETUPS = (
    Setup("FlashMLA fp8_ds_mla", "FLASHMLA_SPARSE_DSV4", 90, "BLHNC", "fp8_ds_mla", 256),
    Setup("FlashMLA fp8_ds_mla, Blackwell", "FLASHMLA_SPARSE_DSV4", 100, "BLNHC", "fp8_ds_mla", 256, (4, 8)),
    Setup("FlashInfer bf16", "FLASHINFER_MLA_SPARSE_DSV4", 100, "BLHNC", "bfloat16", 256, (4, 8)),
)
M3_SETUPS = (
    Setup("M3 sparse bf16", "MINIMAX_M3_SPARSE", block=128),
    Setup("M3 MSA nvfp4", "CUTLASS_MSA", 100, dtype="nvfp4", block=128, tp=(2, 4)),
    Setup("M3 sparse fp8", "MINIMAX_M3_SPARSE", dtype="fp8", block=128, tp=(2, 4)),
)
HYBRID = (
    Setup("FA NHD", "FLASH_ATTN", layout="LBNHC"),
    Setup("FA HND", "FLASH_ATTN", tp=(2, 4)),
    Setup("FlashInfer HND", "FLASHINFER", 100, tp=(2, 8)),
)
HYBRID_MLA = (Setup("FlashMLA", "FLASHMLA", block=64), Setup("Cutlass MLA", "CUTLASS_MLA", 100, block=128, tp=(2, 4)))
DIFFKV = (
    Setup("FA DIFFKV NHD", "FLASH_ATTN_DIFFKV", layout="LBNHC"),
    Setup("FA DIFFKV HND", "FLASH_ATTN_DIFFKV", tp=(2, 4)),
    Setup("Triton DIFFKV", "TRITON_ATTN_DIFFKV", tp=(4, 8)),
)
WITH_IMAGES = (
    Setup("Triton+FA", "TRITON_FLASH_ATTN", tp=(1, 2, 4)),
    Setup("Triton+FA NHD", "TRITON_FLASH_ATTN", layout="LBNHC", tp=(2, 4, 8)),
    Setup("Triton+FlashInfer", "TRITON_FLASHINFER", 100, tp=(2,)),
    Setup("Triton", "TRITON_ATTN", tp=(4, 8)),
)

_SPARSE = (Latent(), Index("v32"))
_GDN = State("gated_delta_net", (16, 32, 128, 128, 4))
_V4 = (
    (V4("main", 4), V4("window"), V4("index", 4), V4("main state", 4), V4("index state", 4)),
    (V4("main", 128), V4("window"), V4("main state", 128)),
)

MODELS = (
    Model("Llama-3 70B", "LlamaForCausalLM", 80, 8, ((Attention(8, 128),),), EVERY),
    Model("Llama-4 Maverick", "Llama4ForConditionalGeneration", 48, 8,
          (*((Attention(8, 128, chunk=8192),),) * 3, (Attention(8, 128),)), PLAIN),
    Model("Qwen3 235B", "Qwen3MoeForCausalLM", 94, 4, ((Attention(4, 128),),), PLAIN),
    Model("Qwen3-Next 80B", "Qwen3NextForCausalLM", 48, 2, (*((_GDN,),) * 3, (Attention(2, 256),)), HYBRID),
    Model("gpt-oss 120B", "GptOssForCausalLM", 36, 8, ((Attention(8, 64, window=128),), (Attention(8, 64),)), PLAIN),
    Model("GLM-4.6", "Glm4MoeForCausalLM", 92, 8, ((Attention(8, 128),),), PLAIN),
    Model("GLM-5", "GlmMoeDsaForCausalLM", 78, 64, (_SPARSE,), DSA),
    Model("GLM-5-Next", "Glm5NextForCausalLM", 48, 64,
          ((Latent(512), Index("glm5next", pool=4), Tail()), *((State("kda", (64, 128)),),) * 3),
          (Setup("FlashMLA sparse bf16, Hopper", "FLASHMLA_SPARSE", 90, "BLHNC", block=128, tp=(4, 8)),)),
    Model("MiniMax-M2", "MiniMaxM2ForCausalLM", 62, 8, ((Attention(8, 128),),), PLAIN),
    Model("MiniMax-M3", "MiniMaxM3ForCausalLM", 60, 4, ((Attention(4, 128), Index("m3")),), M3_SETUPS),
    Model("Kimi-K2", "DeepseekV3ForCausalLM", 61, 64, ((Latent(),),), MLA),
    Model("Kimi-Linear 48B", "KimiLinearForCausalLM", 27, 32, (*((State("kda", (32, 128)),),) * 3, (Latent(),)),
          HYBRID_MLA),
    Model("DeepSeek-V3", "DeepseekV3ForCausalLM", 61, 128, ((Latent(),),), MLA),
    Model("DeepSeek-V3.2", "DeepseekV32ForCausalLM", 61, 128, (_SPARSE,), DSA),
    Model("DeepSeek-V4", "DeepseekV4ForCausalLM", 43, 1, _V4, V4_SETUPS),
    Model("Nemotron-H 30B", "NemotronHForCausalLM", 52, 2,
          (*((State("mamba2", (4096, 8, 64, 64, 128, 4), groups=8),),) * 3, (Attention(2, 128),)), HYBRID),
    Model("Gemma-3 27B", "Gemma3ForConditionalGeneration", 62, 16,
          (*((Attention(16, 128, window=1024),),) * 5, (Attention(16, 128),)), PLAIN),
    Model("Gemma-4 26B", "Gemma4ForConditionalGeneration", 30, 8,
          (*((Attention(8, 256, window=1024),),) * 2, (Attention(2, 512),)), WITH_IMAGES, per_layer=True),
    Model("Gemma-4 31B", "Gemma4ForConditionalGeneration", 60, 16,
          (*((Attention(16, 256, window=1024),),) * 2, (Attention(4, 512),)), WITH_IMAGES, per_layer=True),
    Model("MiMo-V2 Flash", "MiMoV2FlashForCausalLM", 48, 4,
          (*((Attention(8, 192, 128, window=128),),) * 2, (Attention(4, 192, 128),)), DIFFKV, per_layer=True),
    Model("Bailing-linear", "BailingMoeLinearForCausalLM", 32, 4,
          (*((State("linear", (32, 128)),),) * 3, (Attention(4, 128),)), HYBRID),
    Model("Jamba 1.5 Large", "JambaForCausalLM", 72, 8,
          (*((State("mamba1", (16384, 16, 4)),),) * 3, (Attention(8, 128),)), HYBRID),
    Model("Granite-4 Small", "GraniteMoeHybridForCausalLM", 40, 8,
          (*((State("mamba2", (8192, 1, 128, 64, 128, 4), groups=1),),) * 3, (Attention(8, 128),)), HYBRID),
)  # fmt: skip
