"""Makes golden/nf4.safetensors: matrices, and what bitsandbytes makes of them in 4 bits on the CPU. And golden/llama_nf4: a tiny
Llama as transformers saves it in 4 bits, with PyTorch's logits, and in `plain` before that.

    python golden/nf4.py

NAME stands for a matrix, STATE for `single` (absmax in f32) or `double` (absmax in 8 bits):
NAME.original, NAME.STATE.weight and its companions as bitsandbytes saves them, NAME.STATE.f32 and .bf16 expanded again
(of `long`, which is large, only long.double.bf16).
"""

import shutil

import bitsandbytes
import torch
from bitsandbytes.functional import dequantize_4bit, get_4bit_type, quantize_4bit
from make import ROOT, Language
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, logging

BLOCK = 64

# After a pass without gradients, layers would compute in bf16, and without gradients ever after.
bitsandbytes.nn.modules.has_avx512bf16 = lambda: False

# The tokens of bytes, heads of a block, and 192 columns, which two shards have as 128 and 64.
LLAMA = Language(
    LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=64,
        initializer_range=0.1,
    )
)
QUANTISED = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
    llm_int8_skip_modules=["lm_head", "model.layers.1.self_attn.o_proj"],
)


def matrices():
    random = torch.Generator().manual_seed(4)
    return {
        "plain": torch.randn(24, 128, generator=random),
        "edges": edges(random),
        # The last block is short.
        "ragged": 0.05 * torch.randn(9, 46, generator=random),
        # More than 256 blocks: their absmax are two blocks of the second quantisation.
        "long": (0.02 * torch.randn(264, BLOCK, generator=random)).bfloat16(),
    }


def edges(random):
    """Blocks of zeros, of one sign, of small and large numbers, and with numbers on and beside the midpoints, [16, 64]."""
    code = get_4bit_type("nf4", device="cpu")
    midpoints = (code[:-1] + code[1:]) / 2
    infinity = torch.tensor(float("inf"))
    beside = torch.cat([midpoints, midpoints.nextafter(infinity), midpoints.nextafter(-infinity), code, -code])
    rows = torch.randn(16, BLOCK, generator=random)
    rows[1] = 0
    rows[2] = -rows[2].abs()
    rows[3] *= 1e-6
    rows[4] *= 1e6
    rows[5, 1:] = 0
    rows[6] = 3
    # The absmax is 1, a power of two, whose reciprocal is exact, and then others, whose are not.
    for row, absmax in enumerate([1.0, 0.25, 4.0, 0.3, -0.7, 5.0], start=8):
        chosen = torch.randperm(len(beside), generator=random)[: BLOCK - 1]
        rows[row] = absmax * torch.cat([torch.ones(1), beside[chosen]])
    # All three of every midpoint; the 64th is the absmax.
    rows[14] = torch.cat([beside[: BLOCK - 1], torch.ones(1)])
    return rows


def quantised(name, matrix):
    found = {f"{name}.original": matrix}
    for state_name, is_double in (("single", False), ("double", True)):
        packed, state = quantize_4bit(matrix, blocksize=BLOCK, quant_type="nf4", compress_statistics=is_double)
        prefix = f"{name}.{state_name}"
        found[f"{prefix}.weight"] = packed
        found.update({f"{prefix}.weight.{key}": part.clone() for key, part in state.as_dict(packed=True).items()})
        for dtype_name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            # The large matrix is there for its absmax: one expansion will do.
            if name != "long" or (is_double and dtype == matrix.dtype):
                state.dtype = dtype
                found[f"{prefix}.{dtype_name}"] = dequantize_4bit(packed, state)
    return found


def make_llama(folder):
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(44)
    AutoModelForCausalLM.from_config(LLAMA.config).bfloat16().save_pretrained(folder / "plain")

    def load(folder, **options):
        options = dict(dtype=torch.float32, attn_implementation="eager", device_map="cpu") | options
        return AutoModelForCausalLM.from_pretrained(folder, **options)

    load(folder / "plain", quantization_config=QUANTISED).save_pretrained(folder)
    batch = LLAMA.batch(torch.Generator().manual_seed(44))
    with torch.no_grad():
        logits = LLAMA.logits(load(folder).eval(), batch)
    save_file({**batch, **LLAMA.constants(), "logits": logits}, folder / "golden.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    tensors = {}
    for name, matrix in matrices().items():
        tensors.update(quantised(name, matrix))
    file = ROOT / "nf4.safetensors"
    save_file(tensors, file)
    print(f"{file.name}: {file.stat().st_size // 1024} KiB")
    make_llama(ROOT / "llama_nf4")
