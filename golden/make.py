"""Makes the golden folders: tiny Hugging Face checkpoints and the numbers PyTorch computes from them.

    python golden/make.py            every case
    python golden/make.py CASE...    only those

Shapes: T tokens of all documents laid end to end, V vocabulary, B images, C channels, H height, W width, S steps.
"""

import shutil
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from jet import JetConfig, JetNemotronForCausalLM
from noise import noisy
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    BertConfig,
    BloomConfig,
    Cohere2Config,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GPTJConfig,
    GptOssConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RobertaConfig,
    SmolLM3Config,
    Starcoder2Config,
    ViTConfig,
    logging,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

ROOT = Path(__file__).parent
IGNORED = -100
STEPS = 10
NOISE = dict(seed=77, first_token=1000)


@dataclass
class Case:
    config: PreTrainedConfig
    shard: str = "1GB"
    adamw: bool = False
    optimizers: bool = False
    dropout: dict = None  # what config.json would say for `dropout.safetensors`
    balance: float = None  # the coefficient of the loss of balance among experts for `balance.safetensors`
    carried: tuple = ()  # beginnings of the names of weights that a text has nothing to do with

    def constants(self):
        return {}


@dataclass
class Language(Case):
    documents: tuple = (24, 24)  # lengths; each document is its own sequence with its own positions

    auto = AutoModelForCausalLM

    def segments(self):
        return torch.tensor((0, *self.documents)).cumsum(0)  # [documents + 1]

    def constants(self):
        return {"segments": self.segments().int()}

    def batch(self, random):
        tokens = sum(self.documents)
        # Token 0 is Gemma's padding, whose embedding PyTorch gives no gradient.
        input_ids = torch.randint(1, self.config.get_text_config().vocab_size, (tokens,), generator=random)
        labels = input_ids.roll(-1)
        labels[self.segments()[1:] - 1] = IGNORED
        labels[torch.randperm(tokens, generator=random)[: tokens // 8]] = IGNORED
        return {"input_ids": input_ids.int(), "labels": labels.int()}  # [T], [T]

    def logits(self, model, batch):
        documents = batch["input_ids"].split(self.documents)
        return torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in documents])  # [T, V]


@dataclass
class Jet(Language):
    auto = JetNemotronForCausalLM


@dataclass
class TextOf(Language):
    """The text of a model that also reads pictures."""

    auto = AutoModelForImageTextToText


@dataclass
class Text(Case):
    """Texts with a label each."""

    documents: tuple = (17, 24, 1, 9)  # lengths; the second type of tokens begins in the middle of a document

    auto = AutoModelForSequenceClassification

    def constants(self):
        return {"segments": torch.tensor((0, *self.documents)).cumsum(0).int()}  # [documents + 1]

    def batch(self, random):
        config = self.config
        first = config.pad_token_id + 1
        types = [torch.arange(length) >= (length + 1) // 2 for length in self.documents]
        return {
            "input_ids": torch.randint(first, config.vocab_size, (sum(self.documents),), generator=random).int(),  # [T]
            "token_type_ids": torch.cat(types).int() * (config.type_vocab_size - 1),  # [T]
            "labels": torch.randint(config.num_labels, (len(self.documents),), generator=random).int(),  # [D]
        }

    def logits(self, model, batch):
        parts = zip(*(batch[key].split(self.documents) for key in ("input_ids", "token_type_ids")))
        return torch.cat([model(input_ids=ids[None], token_type_ids=types[None]).logits for ids, types in parts])  # [D, labels]


@dataclass
class Image(Case):
    images: int = 3

    auto = AutoModelForImageClassification

    def batch(self, random):
        config = self.config
        shape = (self.images, config.num_channels, config.image_size, config.image_size)
        return {
            "pixel_values": torch.randn(shape, generator=random),  # [B, C, H, W]
            "labels": torch.randint(config.num_labels, (self.images,), generator=random).int(),  # [B]
        }

    def logits(self, model, batch):
        return model(pixel_values=batch["pixel_values"]).logits  # [B, labels]


TINY = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
LLAMA2 = TINY | dict(num_key_value_heads=4)
ENCODER = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
NEOX = dict(
    vocab_size=101,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    rotary_pct=0.25,
)
# Special tokens of a vocabulary this small.
SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    partial_rotary_factor=0.5,
    short_factor=[1.1, 1.7],
    long_factor=[1.5, 9.0],
)
GROWING = dict(
    rope_type="yarn",
    rope_theta=1e6,
    factor=8.0,
    original_max_position_embeddings=8,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)
DELTA = dict(
    num_hidden_layers=3,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    max_position_embeddings=256,
)
DELTA_EXPERTS = (
    TINY
    | SPECIAL
    | DELTA
    | dict(
        intermediate_size=None,
        num_hidden_layers=2,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=20,
    )
)
QWEN_VISION = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    patch_size=4,
    out_hidden_size=32,
    num_position_embeddings=16,
)
GEMMA4 = (
    TINY
    | SPECIAL
    | dict(
        num_hidden_layers=3,
        head_dim=8,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=128,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=100.0),
            full_attention=dict(rope_type="proportional", rope_theta=1000.0, partial_rotary_factor=0.5),
        ),
    )
)
# Full layers have one key and value head, whose values are its keys before their norm.
GEMMA4_SHARED_VALUES = dict(attention_k_eq_v=True, num_global_key_value_heads=1)
FALCON = dict(
    vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, **SPECIAL
)
NEOX_DROPOUT = dict(attention_dropout=0.3, hidden_dropout=0.2)

CASES = {
    "llama2": Language(LlamaConfig(**LLAMA2)),
    # Wavelengths 6, 32, 167 and up against the bounds 16 and 64: one kept, one smoothed, the others divided.
    "llama3": Language(
        LlamaConfig(
            **TINY | dict(hidden_size=64, intermediate_size=96, max_position_embeddings=512),
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        ),
        shard="80KB",
        adamw=True,
    ),
    "llama_linear": Language(
        LlamaConfig(
            **TINY,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
        )
    ),
    "llama_odd": Language(
        LlamaConfig(
            vocab_size=97,
            hidden_size=33,
            intermediate_size=53,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=10,
            max_position_embeddings=64,
        )
    ),
    "llama_packed": Language(LlamaConfig(**TINY), documents=(7, 1, 19, 5), dropout=dict(attention_dropout=0.3)),
    "llama_short": Language(LlamaConfig(**LLAMA2), documents=(2,)),
    "llama_yarn": Language(
        LlamaConfig(
            **TINY | dict(hidden_size=64),
            rope_parameters=dict(
                rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=4.0, original_max_position_embeddings=16
            ),
        )
    ),
    # Sequences of 24 tokens: longer than the model was made for, so its base grows.
    "llama_dynamic": Language(
        LlamaConfig(
            **TINY | dict(max_position_embeddings=16),
            rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=3.0),
        )
    ),
    "mistral": Language(MistralConfig(**TINY, sliding_window=8)),
    # Queries grow at positions 8 and 16.
    "ministral3": Language(Ministral3Config(**TINY, head_dim=16, rope_parameters=GROWING)),
    "ministral3_vision": TextOf(
        Mistral3Config(
            text_config=TINY | dict(head_dim=16, rope_parameters=GROWING, model_type="ministral3"),
            vision_config=dict(
                model_type="pixtral",
                hidden_size=16,
                intermediate_size=16,
                num_attention_heads=2,
                head_dim=8,
                num_hidden_layers=1,
                image_size=8,
                patch_size=4,
            ),
            tie_word_embeddings=False,
        ),
        carried=("vision_tower.", "multi_modal_projector."),
    ),
    "qwen2": Language(Qwen2Config(**TINY, tie_word_embeddings=True), optimizers=True),
    "qwen3": Language(Qwen3Config(**TINY | dict(hidden_size=40), head_dim=16)),
    "mixtral": Language(MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2), balance=0.5),
    # The second of three layers has no experts.
    "qwen3_moe": Language(
        Qwen3MoeConfig(
            **TINY | dict(num_hidden_layers=3),
            head_dim=16,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            mlp_only_layers=[1],
        ),
        documents=(7, 1, 19, 5),
        balance=0.5,
    ),
    # More experts than find tokens.
    "qwen3_moe_one": Language(
        Qwen3MoeConfig(**TINY, head_dim=8, num_experts=24, num_experts_per_tok=1, moe_intermediate_size=12)
    ),
    "qwen3_moe_all": Language(
        Qwen3MoeConfig(
            **TINY, head_dim=8, num_experts=3, num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=True
        )
    ),
    # Documents of one chunk of the delta rule and more, of a token and of less than a convolution.
    "qwen3_5": Language(
        Qwen3_5TextConfig(
            **TINY | SPECIAL | DELTA,
            head_dim=16,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        documents=(70, 1, 3, 129),
    ),
    "qwen3_5_vision": TextOf(
        Qwen3_5Config(
            text_config=TINY | SPECIAL | DELTA | dict(head_dim=16, full_attention_interval=2, tie_word_embeddings=True),
            vision_config=QWEN_VISION,
            tie_word_embeddings=True,
        ),
        carried=("model.visual.",),
    ),
    "qwen3_5_moe": Language(Qwen3_5MoeTextConfig(**DELTA_EXPERTS), documents=(70, 1, 3, 20)),
    "qwen3_5_moe_vision": TextOf(
        Qwen3_5MoeConfig(text_config=DELTA_EXPERTS, vision_config=QWEN_VISION), carried=("model.visual.",)
    ),
    # The second of three layers has no experts.
    "qwen3_next": Language(
        Qwen3NextConfig(
            **DELTA_EXPERTS | dict(num_hidden_layers=3, intermediate_size=80, layer_types=None),
            full_attention_interval=2,
            mlp_only_layers=[1],
        ),
        documents=(70, 1, 3, 129),
    ),
    "jet_nemotron": Jet(
        JetConfig(
            **TINY | SPECIAL | dict(num_hidden_layers=3),
            architectures=["JetNemotronForCausalLM"],
            hidden_act="silu",
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            initializer_range=0.02,
            tie_word_embeddings=True,
            layer_types=["jet", "swa", "jet"],
            efficient_attention_config=dict(
                jet=dict(
                    conv_size=4,
                    dconv_generator_reduction=8,
                    dconv_implementation="triton",
                    expand_v=1.5,
                    head_dim=8,
                    mode="chunk",
                    norm_eps="1e-5",
                    num_heads=4,
                ),
                swa=dict(window_size=8),
            ),
        ),
        documents=(70, 1, 3, 20),
    ),
    # Documents longer than the window, and gates beyond their limit.
    "gpt_oss": Language(
        GptOssConfig(
            **TINY | SPECIAL | dict(intermediate_size=28),
            head_dim=16,
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=8,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=100.0,
                factor=4.0,
                beta_fast=1.5,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=16,
            ),
        ),
        documents=(4, 1, 19, 6),
        dropout=dict(attention_dropout=0.3),
        balance=0.5,
    ),
    "olmoe": Language(OlmoeConfig(**TINY | SPECIAL, num_experts=6, num_experts_per_tok=2), balance=0.5),
    "gemma3": Language(
        Gemma3TextConfig(
            **TINY | dict(num_hidden_layers=3, num_key_value_heads=1),
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(
                sliding_attention=dict(rope_type="default", rope_theta=100.0),
                full_attention=dict(rope_type="default", rope_theta=10000.0),
            ),
        )
    ),
    "gemma3_vision": TextOf(
        Gemma3Config(
            text_config=TINY | SPECIAL | dict(num_key_value_heads=1, head_dim=16, sliding_window=8),
            vision_config=dict(
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                image_size=8,
                patch_size=4,
            ),
            mm_tokens_per_image=4,
        ),
        carried=("vision_tower.", "multi_modal_projector."),
    ),
    "gemma": Language(GemmaConfig(**TINY | SPECIAL | dict(num_key_value_heads=1), head_dim=16)),
    "gemma2": Language(
        Gemma2Config(
            **TINY | SPECIAL,
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=8,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        )
    ),
    "gemma4": Language(Gemma4TextConfig(**GEMMA4, **GEMMA4_SHARED_VALUES, final_logit_softcapping=3.0)),
    "gemma4_experts": Language(
        Gemma4TextConfig(
            **GEMMA4 | GEMMA4_SHARED_VALUES | dict(intermediate_size=40, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]),
            enable_moe_block=True,
            num_experts=5,
            top_k_experts=2,
            moe_intermediate_size=24,
        ),
        documents=(7, 1, 19, 5),
    ),
    # The three layers at the end attend to the keys and values of those of their type before them.
    "gemma4_shared": Language(
        Gemma4TextConfig(
            **GEMMA4
            | dict(
                num_hidden_layers=5,
                layer_types=["full_attention", *3 * ["sliding_attention"], "full_attention"],
                hidden_size_per_layer_input=24,
            ),
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
        ),
        documents=(7, 1, 19, 5),
    ),
    "gemma4_vision": TextOf(
        Gemma4Config(
            text_config=GEMMA4 | GEMMA4_SHARED_VALUES | dict(use_bidirectional_attention="vision"),
            vision_config=dict(
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                head_dim=8,
                patch_size=4,
                position_embedding_size=16,
            ),
            audio_config=dict(
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                subsampling_conv_channels=[4, 4],
                output_proj_dims=16,
            ),
        ),
        carried=("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
    ),
    "granite": Language(
        GraniteConfig(
            **TINY,
            attention_bias=True,
            mlp_bias=True,
            embedding_multiplier=3.0,
            residual_multiplier=0.3,
            attention_multiplier=0.2,
            logits_scaling=2.5,
        )
    ),
    "smollm3": Language(SmolLM3Config(**TINY | SPECIAL | dict(num_hidden_layers=3), no_rope_layers=[1, 0, 1])),
    "starcoder2": Language(
        Starcoder2Config(**TINY | SPECIAL, sliding_window=8),
        dropout=dict(attention_dropout=0.3, residual_dropout=0.2, embedding_dropout=0.1),
    ),
    "phi3": Language(
        Phi3Config(
            **TINY | SPECIAL | dict(max_position_embeddings=128),
            sliding_window=8,
            original_max_position_embeddings=64,
            rope_parameters=LONGROPE,
        ),
        dropout=dict(attention_dropout=0.3, resid_pdrop=0.2),
    ),
    "phi3_long": Language(Phi3Config(**TINY | SPECIAL, original_max_position_embeddings=16, rope_parameters=LONGROPE)),
    "gptj": Language(
        GPTJConfig(
            vocab_size=101,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            rotary_dim=4,
            bos_token_id=0,
            eos_token_id=0,
        ),
        dropout=dict(attn_pdrop=0.3, resid_pdrop=0.2, embd_pdrop=0.1),
    ),
    "cohere2": Language(
        Cohere2Config(
            **TINY | SPECIAL,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            logit_scale=0.25,
        )
    ),
    "glm4": Language(Glm4Config(**TINY | SPECIAL, head_dim=16)),
    "olmo2": Language(Olmo2Config(**TINY | SPECIAL, attention_bias=True)),
    "olmo3": Language(
        Olmo3Config(
            **TINY | SPECIAL | dict(num_hidden_layers=3),
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(
                sliding_attention=dict(rope_type="default", rope_theta=10000.0),
                full_attention=dict(
                    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16
                ),
            ),
        )
    ),
    # Six heads: the slopes of the last two lie between those of the others.
    "bloom": Language(
        BloomConfig(vocab_size=101, hidden_size=48, n_layer=2, n_head=6, bos_token_id=1, eos_token_id=2),
        dropout=dict(attention_dropout=0.3, hidden_dropout=0.2),
    ),
    "opt": Language(
        OPTConfig(
            **SPECIAL,
            vocab_size=128,
            hidden_size=32,
            ffn_dim=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
            dropout=0.0,
        ),
        dropout=dict(attention_dropout=0.3, dropout=0.2),
    ),
    "falcon": Language(FalconConfig(**FALCON)),
    "falcon_new": Language(FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True)),
    "gpt2": Language(
        GPT2Config(
            vocab_size=101,
            n_positions=32,
            n_embd=32,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        ),
        dropout=dict(attn_pdrop=0.3, resid_pdrop=0.2, embd_pdrop=0.1),
    ),
    "gpt_neox": Language(GPTNeoXConfig(**NEOX, use_parallel_residual=True), dropout=NEOX_DROPOUT),
    "gpt_neox_serial": Language(GPTNeoXConfig(**NEOX, use_parallel_residual=False), dropout=NEOX_DROPOUT),
    "bert": Text(
        BertConfig(**ENCODER, max_position_embeddings=80, num_labels=5),
        dropout=dict(attention_probs_dropout_prob=0.3, hidden_dropout_prob=0.2, classifier_dropout=0.4),
    ),
    "roberta": Text(
        RobertaConfig(
            **ENCODER, max_position_embeddings=82, num_labels=3, type_vocab_size=1, bos_token_id=0, pad_token_id=1, eos_token_id=2
        ),
        dropout=dict(attention_probs_dropout_prob=0.3, hidden_dropout_prob=0.2),
    ),
    "vit": Image(
        ViTConfig(
            image_size=24,
            patch_size=8,
            num_channels=3,
            hidden_size=32,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_labels=10,
        ),
        adamw=True,
        dropout=dict(attention_probs_dropout_prob=0.3, hidden_dropout_prob=0.2),
    ),
}


def make(name, case):
    folder = ROOT / name
    shutil.rmtree(folder, ignore_errors=True)
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    save_random_checkpoint(case, folder, random)

    # Loaded back, so the numbers are those of the files and not of a model the files might misstate.
    model = case.auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    batch = case.batch(random)
    save_file(golden(case, model, batch), folder / "golden.safetensors")
    untrained = (*case.carried, *(name for name, _ in model.named_buffers()))
    weights = {key: shape for key, shape in weight_shapes(folder).items() if not key.startswith(untrained)}
    assert gradient_shapes(folder) == weights
    if case.dropout:
        save_file(dropout(case, folder, batch), folder / "dropout.safetensors")
    if case.balance:
        save_file(balance(case, folder, batch), folder / "balance.safetensors")
    if case.adamw:
        save_file(adamw(case, model, random), folder / "adamw.safetensors")

    if case.optimizers:
        save_file(optimizers(case, folder), folder / "optimizers.safetensors")

    size_kib = sum(file.stat().st_size for file in folder.iterdir()) // 1024
    print(f"{name}: {size_kib} KiB")


def save_random_checkpoint(case, folder, random):
    # Some vectors start at random.
    torch.manual_seed(0)
    model = case.auto.from_config(case.config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.dim() > 1:
                parameter.copy_(0.15 * noise)
            else:
                # Norms and biases start where they do nothing, which would hide a wrong gradient.
                parameter.add_(0.2 * noise)
        for module in model.modules():
            turn_keys_to_queries(module)
            widen_gates(module)
            if hasattr(module, "q_norm") and getattr(module, "scaling", None) == 1.0:
                # Scores are not divided by anything, and random ones would make every softmax a choice.
                module.q_norm.weight.mul_(0.3)
            if hasattr(module, "layer_scalar"):
                module.layer_scalar.copy_(0.6 + 0.4 * torch.rand(1, generator=random))
    model.save_pretrained(folder, max_shard_size=case.shard)
    (folder / "generation_config.json").unlink(missing_ok=True)


def turn_keys_to_queries(module):
    """A document's first token gets ⟨q, k⟩·v of linear attention, and a norm behind it: without this, its sign would be a matter
    of rounding."""

    def turn(queries, keys):
        keys.copy_(queries + 0.3 * keys)

    if hasattr(module, "conv1d"):
        in_blocks = [module.conv1d.weight] + ([module.in_proj_qkv.weight] if hasattr(module, "in_proj_qkv") else [])
        for weight in in_blocks:
            turn(weight[: module.key_dim], weight[module.key_dim : 2 * module.key_dim])
    if hasattr(module, "in_proj_qkvz"):
        for head in module.in_proj_qkvz.weight.chunk(module.num_k_heads):
            turn(head[: module.head_k_dim], head[module.head_k_dim : 2 * module.head_k_dim])
    if hasattr(module, "dynamic_conv1d"):
        turn(module.q_proj.weight, module.k_proj.weight)


def widen_gates(module):
    """Clamped gates reach their limit."""
    if hasattr(module, "gate_up_proj_bias"):
        module.gate_up_proj.mul_(3.0)


def golden(case, model, batch):
    labels = batch["labels"].long()
    logits = case.logits(model, batch)
    loss = cross_entropy(logits, labels, ignore_index=IGNORED)
    smoothed_loss = cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=0.1)

    loss.backward()
    gradients = as_saved(model, gradients_of(model))
    return {
        **case.constants(),
        **batch,
        "logits": logits.detach(),
        "loss": loss.detach().reshape(1),
        "smoothed_loss": smoothed_loss.detach().reshape(1),
        **{f"grad.{key}": gradient for key, gradient in gradients.items()},
    }


def dropout(case, folder, batch):
    """The loss and gradients of `golden` in training, with dropout that others can repeat."""
    model = case.auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **case.dropout)
    with noisy(model, **NOISE):
        logits = case.logits(model, batch)
    loss = cross_entropy(logits, batch["labels"].long(), ignore_index=IGNORED)
    loss.backward()
    gradients = as_saved(model, gradients_of(model))
    return {"loss": loss.detach().reshape(1), **{f"grad.{key}": gradient for key, gradient in gradients.items()}}


def balance(case, folder, batch):
    """The loss of balance among experts over all documents together, and the gradients of both losses."""
    model = case.auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    documents = batch["input_ids"].split(case.documents)
    passes = [model(input_ids=ids[None], use_cache=False, output_router_logits=True) for ids in documents]
    loss = cross_entropy(torch.cat([found.logits[0] for found in passes]), batch["labels"].long(), ignore_index=IGNORED)
    layers = tuple(torch.cat(layer) for layer in zip(*(found.router_logits for found in passes)))  # [T, E] each
    config = model.config
    unbalanced = load_balancing_loss_func(layers, layers[0].shape[1], config.num_experts_per_tok)
    (loss + case.balance * unbalanced).backward()
    gradients = as_saved(model, gradients_of(model))
    return {
        "loss": loss.detach().reshape(1),
        "balance_loss": unbalanced.detach().reshape(1),
        **{f"grad.{key}": gradient for key, gradient in gradients.items()},
    }


def train(case, model, batches, optimizers):
    """The loss before each update, [S]."""
    losses = []
    for batch in batches:
        model.zero_grad()
        loss = cross_entropy(case.logits(model, batch), batch["labels"].long(), ignore_index=IGNORED)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def stacked(batches):
    return {key: torch.stack([batch[key] for batch in batches]) for key in batches[0]}  # [S, ...]


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2."""

    def __init__(self, parameters, lr, betas, weight_decay):
        super().__init__(parameters, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                direction = (beta1 * mean + (1 - beta1) * parameter.grad).sign()
                parameter.sub_(group["lr"] * (direction + group["weight_decay"] * parameter))
                mean.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)


def muon(model, **options):
    """Muon for the matrices of hidden layers, AdamW for the rest."""
    outer = [*model.get_input_embeddings().parameters(), *model.get_output_embeddings().parameters()]
    outer = {id(parameter) for parameter in outer}
    is_hidden = {key: p.dim() == 2 and id(p) not in outer for key, p in model.named_parameters()}
    hidden = [parameter for key, parameter in model.named_parameters() if is_hidden[key]]
    rest = [parameter for key, parameter in model.named_parameters() if not is_hidden[key]]
    return [
        torch.optim.Muon(hidden, lr=1e-3, weight_decay=0.1, momentum=0.95, **options),
        torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    ]


OPTIMIZERS = {
    "sgd": lambda model: [torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)],
    "nesterov": lambda model: [
        torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)
    ],
    "lion": lambda model: [Lion(model.parameters(), lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1)],
    "adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=1e-2, weight_decay=0.1)],
    "muon": lambda model: muon(model, adjust_lr_fn="match_rms_adamw"),
    "muon_original": lambda model: muon(model, nesterov=False, adjust_lr_fn="original"),
}


def optimizers(case, folder):
    """Ten steps by each of them, from the folder's weights on the same batches."""
    random = torch.Generator().manual_seed(7)
    batches = [case.batch(random) for _ in range(STEPS)]
    found = {**case.constants(), **stacked(batches)}
    # Muon makes matrices orthogonal in bf16, which would hide how exact another implementation is: here it does in f32.
    to_bf16, torch.Tensor.bfloat16 = torch.Tensor.bfloat16, torch.Tensor.clone
    for name, make in OPTIMIZERS.items():
        model = case.auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        found[f"losses.{name}"] = train(case, model, batches, make(model))
        found.update({f"{name}.{key}": weight for key, weight in as_saved(model, model.state_dict()).items()})
    torch.Tensor.bfloat16 = to_bf16
    return found


def adamw(case, model, random):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    batches = [case.batch(random) for _ in range(STEPS)]
    losses = train(case, model, batches, [optimizer])
    return {
        **case.constants(),
        **stacked(batches),
        "losses": losses,
        **{
            f"final.{key}": weight
            for key, weight in as_saved(model, model.state_dict()).items()
            # Without rotation a key's bias shifts all its scores alike and softmax removes it:
            # its gradient is rounding noise, which AdamW scales up to full steps.
            if not key.endswith("key.bias")
        },
    }


def gradients_of(model):
    return {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}


def as_saved(model, tensors):
    """The tensors under the names, and in the layout, that `save_pretrained` gives the model's weights."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=dict(tensors))
        return load_file(Path(folder) / "model.safetensors")


def weight_shapes(folder):
    return {key: weight.shape for file in folder.glob("model*.safetensors") for key, weight in load_file(file).items()}


def gradient_shapes(folder):
    tensors = load_file(folder / "golden.safetensors")
    return {key.removeprefix("grad."): tensor.shape for key, tensor in tensors.items() if key.startswith("grad.")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    torch.use_deterministic_algorithms(True)
    names = sys.argv[1:] or list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        print(f"error: no case {', '.join(unknown)}\n  hint: the cases are {', '.join(CASES)}", file=sys.stderr)
        sys.exit(2)
    for name in names:
        make(name, CASES[name])
