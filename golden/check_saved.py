"""What transformers makes of a model folder that Evenkeel wrote: loads it unchanged and records its logits.

    python golden/check_saved.py FOLDER

Writes FOLDER/logits.safetensors with the ids of a text, as the folder's own tokenizer gives them, and their logits.
"""
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "12 + 7 = 19.\nMia has 3 boats."


def main():
    folder = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == TEXT, tokenizer.decode(ids[0])
    with torch.no_grad():
        logits = model(ids).logits[0]
    save_file({"input_ids": ids[0].to(torch.int32), "logits": logits.contiguous()}, folder / "logits.safetensors")
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {ids.shape[1]} tokens, {model.generation_config}")


if __name__ == "__main__":
    main()
