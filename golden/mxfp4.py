"""Makes golden/gpt_oss_mxfp4: a tiny GPT-OSS whose experts are in MXFP4, as OpenAI saves them, with transformers' logits.

    python golden/mxfp4.py
"""

import json
import shutil

import torch
from make import ROOT, SPECIAL, TINY, Language, save_random_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, logging

BLOCK = 32
NAME = "gpt_oss_mxfp4"
CASE = Language(
    GptOssConfig(
        **TINY | SPECIAL | dict(intermediate_size=64, num_hidden_layers=1),
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    )
)


def is_quantised(key):
    return key.endswith(("experts.gate_up_proj", "experts.down_proj"))


def random_codes(shape, random):
    """Codes and scales for weights of this shape, [E, rows, columns]: each expert's matrix transposed."""
    experts, rows, columns = shape
    blocks = (experts, columns, rows // BLOCK)
    codes = torch.randint(256, (*blocks, BLOCK // 2), generator=random, dtype=torch.uint8)
    scales = torch.randint(122, 127, blocks, generator=random, dtype=torch.uint8)
    # Codes of a block of zeros may have any scale.
    codes[0, 0, 0] = 0
    scales[0, 0, 0] = 0
    return codes, scales


def make():
    folder = ROOT / NAME
    shutil.rmtree(folder, ignore_errors=True)
    random = torch.Generator().manual_seed(11)
    save_random_checkpoint(CASE, folder, random)
    weights = {}
    for key, weight in load_file(folder / "model.safetensors").items():
        if is_quantised(key):
            weights[f"{key}_blocks"], weights[f"{key}_scales"] = random_codes(weight.shape, random)
        else:
            weights[key] = weight.bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "bfloat16"
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    # On a CPU, transformers expands them.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").float()
    batch = CASE.batch(random)
    with torch.no_grad():
        logits = CASE.logits(model, batch)
    expanded = {key: weight.bfloat16() for key, weight in model.state_dict().items() if is_quantised(key)}
    save_file({**CASE.constants(), **batch, "logits": logits, **expanded}, folder / "golden.safetensors")


if __name__ == "__main__":
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    make()
