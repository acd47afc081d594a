"""Makes golden/adapters: PEFT's adapters of the golden checkpoints and the numbers PyTorch computes with them.

    python golden/adapters.py            every case
    python golden/adapters.py CASE...    only those

Run `make.py` and `nf4.py` first: an adapter stands on the weights, the batch and the AdamW steps of its base folder.
"""

import json
import os
import re
import shutil
import sys
import warnings
import zlib
from dataclasses import dataclass

import torch
from make import CASES as MODELS
from make import IGNORED, NOISE, ROOT, STEPS, Language, Text, stacked, train
from nf4 import LLAMA as LLAMA_NF4
from noise import kept_rows, seed_of
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import logging

FOLDER = ROOT / "adapters"
BASES = MODELS | {"llama_nf4": LLAMA_NF4}
FIRST_SITE = 2**32  # of adapters' dropout; the sites of models are smaller


@dataclass
class Adapter:
    base: str
    options: dict  # of PEFT's LoraConfig
    merged: tuple = ()  # modules whose weights after merging are written down, or the parameters themselves


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

CASES = {
    "llama_lora": Adapter(
        "llama3",
        dict(r=4, lora_alpha=8, target_modules="all-linear"),
        merged=("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"),
    ),
    "qwen2_rslora": Adapter(
        "qwen2", dict(r=6, lora_alpha=5, use_rslora=True, target_modules=[*ATTENTION, "down_proj"])
    ),
    "gemma3_dora": Adapter(
        "gemma3",
        dict(r=3, use_dora=True, target_modules="all-linear"),
        merged=("model.layers.0.self_attn.k_proj",),
    ),
    "llama_dora": Adapter(
        "llama2", dict(r=4, lora_alpha=6, use_dora=True, target_modules=["q_proj", "o_proj", "gate_proj", "down_proj"])
    ),
    "gpt2_lora": Adapter(
        "gpt2",
        dict(r=3, lora_alpha=6, fan_in_fan_out=True, target_modules=["c_attn", "c_proj", "c_fc"]),
        merged=("transformer.h.0.attn.c_proj",),
    ),
    # Biases, which the magnitudes do not scale, and matrices that the checkpoint has transposed.
    "gpt2_dora": Adapter(
        "gpt2", dict(r=2, lora_alpha=3, fan_in_fan_out=True, use_dora=True, target_modules=["c_attn", "c_proj"])
    ),
    # `query`, `value` and `dense` of the checkpoint have other names in today's transformers: see `with_old_names`.
    "vit_lora": Adapter(
        "vit",
        dict(
            r=2,
            lora_alpha=4,
            target_modules=["q_proj", "v_proj", "o_proj", "fc1", "fc2"],
            modules_to_save=["classifier"],
        ),
    ),
    # PEFT trains the head of texts whole.
    "bert_lora": Adapter(
        "bert",
        dict(r=2, lora_alpha=4, target_modules=["query", "value", "intermediate.dense", "output.dense"]),
        merged=("bert.encoder.layer.1.output.dense",),
    ),
    "roberta_lora": Adapter("roberta", dict(r=3, lora_alpha=3, target_modules=["query", "key", "value"])),
    # PEFT sorts the patterns when it writes them and takes the first that matches: they are sorted here, too.
    "llama_patterns": Adapter(
        "llama3",
        dict(
            r=4,
            lora_alpha=8,
            target_modules=r".*\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj",
            exclude_modules=["o_proj", "layers.0.mlp.up_proj"],
            rank_pattern={
                "^model.layers.1.mlp.(gate|up)_proj": 6,  # from the path's beginning
                "_proj": 9,  # of no module: a match begins behind a dot
                "down_proj": 1,  # before the next one, which matches that of layer 0, too
                r"layers\.0\.mlp\..*": 5,
                "q_proj": 2,
                "self_attn.k": 9,  # of no module: a match ends where the path does
            },
            alpha_pattern={
                "(k_proj|v_proj)": 3,
                "down_proj": 1.5,
                r"model\.layers\.[1-9]\d*\.mlp\.gate_proj": 12,
            },
        ),
    ),
    "llama_layers": Adapter(
        "llama_odd",
        dict(
            r=2,
            lora_alpha=3,
            target_modules=["q_proj", "v_proj", "mlp.down_proj"],
            exclude_modules=r"model\.layers\.2\..*v_proj",
            layers_to_transform=[1, 2],
            rank_pattern={"layers.2.self_attn.q_proj": 3},
        ),
    ),
    # The base has one matrix for embedding and head. The adapter trains a copy as embedding; the head stays the base's.
    # `norm` is the end of the name of every norm.
    "llama_saved_tied": Adapter(
        "llama3",
        dict(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens", "norm"]),
    ),
    "llama_saved_untied": Adapter(
        "llama2",
        dict(
            r=2,
            lora_alpha=4,
            target_modules=["q_proj", "v_proj"],
            modules_to_save=["embed_tokens", "lm_head", "input_layernorm"],
        ),
    ),
    # The head stays the trained embedding.
    "qwen2_saved_tied": Adapter(
        "qwen2",
        dict(
            r=2,
            lora_alpha=4,
            target_modules=["q_proj", "v_proj"],
            modules_to_save=["embed_tokens"],
            ensure_weight_tying=True,
        ),
    ),
    # Beside sinks and biases.
    "gpt_oss_lora": Adapter("gpt_oss", dict(r=4, lora_alpha=4, target_modules=ATTENTION)),
    # Experts, of which one layer has none. An adapter of both parameters has gate_up's factors under `base_layer`.
    "qwen3_moe_experts": Adapter(
        "qwen3_moe",
        dict(
            r=4,
            lora_alpha=8,
            target_modules=ATTENTION,
            target_parameters=EXPERTS,
            rank_pattern={r"layers\.2\..*gate_up_proj": 5, "experts.down_proj": 3},
            alpha_pattern={"down_proj": 7},
        ),
        merged=("model.layers.0.mlp.experts.gate_up_proj", "model.layers.2.mlp.experts.down_proj"),
    ),
    # Matrices that the checkpoint has transposed, with gates and others in turns. Nothing but experts is adapted.
    "gpt_oss_experts": Adapter(
        "gpt_oss",
        dict(r=2, lora_alpha=3, use_rslora=True, target_modules=[], target_parameters=EXPERTS),
        merged=("model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"),
    ),
    # One of both parameters, which then has the short names.
    "mixtral_experts": Adapter(
        "mixtral", dict(r=3, lora_alpha=5, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"])
    ),
    # A base in 4 bits. One of the adapted layers was skipped.
    "llama_qlora": Adapter("llama_nf4", dict(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "down_proj"])),
    # The norms are of the expanded weights.
    "llama_qdora": Adapter(
        "llama_nf4", dict(r=2, lora_alpha=3, use_dora=True, target_modules=["q_proj", "o_proj", "down_proj"])
    ),
    "llama_dropout": Adapter("llama3", dict(r=2, lora_alpha=4, lora_dropout=0.25, target_modules="all-linear")),
}


def make(name, adapter):
    folder, case = FOLDER / name, BASES[adapter.base]
    shutil.rmtree(folder, ignore_errors=True)
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    saved = save_random_adapter(adapter, folder, random)

    # Loaded back, so the numbers are those of the files and not of a model the files might misstate.
    model = load(adapter, folder)
    batch = first_batch(adapter.base)
    assert torch.equal(logits(case, model, batch), logits(case, saved, batch)), (
        f"{name}: PEFT reads back another adapter"
    )
    save_file(
        {**golden(case, model, batch), **adamw(adapter, model), **merged(adapter, folder, batch)},
        folder / "expected.safetensors",
    )
    (folder / "case.json").write_text(json.dumps({"base": adapter.base}) + "\n")
    assert_names_agree(folder)
    print_size(folder)

    if name == "vit_lora":
        with_old_names(folder, FOLDER / "vit_lora_old")


def print_size(folder):
    size_kib = sum(file.stat().st_size for file in folder.iterdir()) // 1024
    print(f"{folder.name}: {size_kib} KiB")


def load_base(base):
    # The path, seen from the repository, is what PEFT writes as `base_model_name_or_path`.
    folder = ROOT.relative_to(ROOT.parent) / base
    return BASES[base].auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def save_random_adapter(adapter, folder, random):
    kinds = {Language: "CAUSAL_LM", Text: "SEQ_CLS"}
    task_type = next((task for kind, task in kinds.items() if isinstance(BASES[adapter.base], kind)), None)
    model = get_peft_model(load_base(adapter.base), LoraConfig(task_type=task_type, **adapter.options))
    with torch.no_grad():
        for key, parameter in trained(model).items():
            noise = torch.randn(parameter.shape, generator=random)
            if ".lora_A." in key:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
            elif ".lora_B." in key:
                # PEFT begins with zeros, which would hide a wrong gradient of A.
                parameter.copy_(0.15 * noise)
            elif ".lora_magnitude_vector." in key:
                # PEFT begins with the norms, which would hide the factor.
                parameter.mul_(1 + 0.1 * noise)
            else:
                parameter.add_(0.1 * noise)

    # PEFT holds names as sets and writes them in no certain order.
    config = model.peft_config["default"]
    for key, value in vars(config).items():
        if isinstance(value, set):
            setattr(config, key, sorted(value))
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    return model


def load(adapter, folder):
    model = PeftModel.from_pretrained(load_base(adapter.base), folder, is_trainable=True)
    share = adapter.options.get("lora_dropout", 0.0)
    if share > 0.0:
        layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        for number, layer in enumerate(layers):
            layer.lora_dropout["default"] = Dropout(share, FIRST_SITE + number)
    return model


class Dropout(torch.nn.Module):
    """Takes the place of PEFT's `lora_dropout` of one layer: drops by seed and place. Its calls follow one another."""

    def __init__(self, share, site):
        super().__init__()
        self.share, self.site = share, site

    def begin(self, seed, first_token):
        self.seed, self.next_token = seed_of(seed, self.site), first_token

    def forward(self, x):
        """[1, T, in]"""
        if not self.training:
            return x
        _, tokens, cols = x.shape
        kept = kept_rows(self.seed, self.next_token, tokens, cols, self.share)
        self.next_token += tokens
        return x * torch.from_numpy(kept) * (1 / (1 - self.share))


def begin_noise(model, seed, first_token):
    for module in model.modules():
        if isinstance(module, Dropout):
            module.begin(seed, first_token)


def first_batch(base):
    tensors = load_file(ROOT / base / "golden.safetensors")
    return {key: tensors[key] for key in ("input_ids", "token_type_ids", "pixel_values", "labels") if key in tensors}


def logits(case, model, batch):
    """Without dropout."""
    model.eval()
    with torch.no_grad():
        return case.logits(model, batch)


def trained(model):
    """By PEFT's own names; one parameter may have two."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {key: parameter for key, parameter in parameters if parameter.requires_grad}


def as_saved(model, tensors):
    """The tensors under the names of `adapter_model.safetensors`."""
    return {key: tensor.clone() for key, tensor in get_peft_model_state_dict(model, state_dict=tensors).items()}


def golden(case, model, batch):
    found = {"logits": logits(case, model, batch)}
    model.train()
    begin_noise(model, **NOISE)
    loss = cross_entropy(case.logits(model, batch), batch["labels"].long(), ignore_index=IGNORED)
    loss.backward()
    gradients = as_saved(model, {key: parameter.grad for key, parameter in trained(model).items()})
    return {
        **found,
        "loss": loss.detach().reshape(1),
        **{f"grad.{key}": gradient for key, gradient in gradients.items()},
    }


def adamw(adapter, model):
    case, base_file = BASES[adapter.base], ROOT / adapter.base / "adamw.safetensors"
    found = {}
    if base_file.exists():
        steps = load_file(base_file)
        keys = first_batch(adapter.base)
        batches = [{key: steps[key][step] for key in keys} for step in range(STEPS)]
    else:
        random = torch.Generator().manual_seed(7)
        batches = [case.batch(random) for _ in range(STEPS)]
        found = {**case.constants(), **stacked(batches)}

    def with_noise():
        """A step has the seed that the trainer gives it; its first token is number 0."""
        for step, batch in enumerate(batches):
            begin_noise(model, seed_of(NOISE["seed"], step), first_token=0)
            yield batch

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    model.train()
    found["losses"] = train(case, model, with_noise(), [optimizer])
    after = as_saved(model, {key: parameter.detach() for key, parameter in trained(model).items()})
    return {**found, **{f"after.{key}": weight for key, weight in after.items()}}


def merged(adapter, folder, batch):
    """Weights of the base with the adapter as it is in the folder."""
    if not adapter.merged:
        return {}
    case, model = BASES[adapter.base], load(adapter, folder)
    expected = logits(case, model, batch)
    model = model.merge_and_unload()
    torch.testing.assert_close(logits(case, model, batch), expected, rtol=1e-4, atol=1e-4)
    names = [name if ".experts." in name else f"{name}.weight" for name in adapter.merged]
    return {f"merged.{name}": model.get_parameter(name).detach() for name in names}


def with_old_names(folder, old_folder):
    """The same adapter as transformers wrote it while its ViT had the checkpoint's names."""
    replaced = [
        (r"vit\.layers\.", "vit.encoder.layer."),
        (r"attention\.q_proj", "attention.attention.query"),
        (r"attention\.v_proj", "attention.attention.value"),
        (r"attention\.o_proj", "attention.output.dense"),
        (r"mlp\.fc1", "intermediate.dense"),
        (r"mlp\.fc2", "output.dense"),
    ]

    def old(key):
        for pattern, replacement in replaced:
            key = re.sub(pattern, replacement, key)
        return key

    shutil.rmtree(old_folder, ignore_errors=True)
    old_folder.mkdir()
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"] = ["dense", "query", "value"]
    (old_folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    for file in ("adapter_model.safetensors", "expected.safetensors"):
        tensors = {old(key): tensor for key, tensor in load_file(folder / file).items()}
        save_file(tensors, old_folder / file, metadata={"format": "pt"} if file.startswith("adapter") else None)
    shutil.copy(folder / "case.json", old_folder)
    assert_names_agree(old_folder)
    print_size(old_folder)


def assert_names_agree(folder):
    expected = load_file(folder / "expected.safetensors")
    weights = {key: weight.shape for key, weight in load_file(folder / "adapter_model.safetensors").items()}
    for prefix in ("grad.", "after."):
        found = {key.removeprefix(prefix): t.shape for key, t in expected.items() if key.startswith(prefix)}
        assert found == weights, f"{folder.name}: {prefix}* are not the adapter's weights"


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="peft")
    torch.use_deterministic_algorithms(True)
    os.chdir(ROOT.parent)
    names = sys.argv[1:] or list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        print(f"error: no case {', '.join(unknown)}\n  hint: the cases are {', '.join(CASES)}", file=sys.stderr)
        sys.exit(2)
    for name in names:
        make(name, CASES[name])
