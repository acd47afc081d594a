"""Training steps of bench/torch_step.py's random Llama in a pipeline of torch.distributed.pipelining. Prints one JSON object.

Needs torch and transformers. Every process that torchrun starts has one stage: the first the embedding, the last the norm and the
head, each as many layers as the others. Threads of a process come from OMP_NUM_THREADS. --batch is the sequences of a step, which
--micros micro-batches share. Rank 0 prints.
"""
import argparse
import json
import os
import resource
import statistics
import time

import torch
import torch.distributed
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
for name, default in dict(hidden=512, layers=4, heads=8, kv_heads=4, ffn=1408, vocab=4096, batch=8, sequence=256, micros=8,
                          steps=12, warmup=3).items():
    parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
parser.add_argument("--order", choices=["gpipe", "1f1b"], default="1f1b")
parser.add_argument("--fused", action="store_true", help="AdamW in one kernel instead of PyTorch's default")
parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
options = parser.parse_args()

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
rank, places = torch.distributed.get_rank(), torch.distributed.get_world_size()
config = LlamaConfig(hidden_size=options.hidden, num_hidden_layers=options.layers, num_attention_heads=options.heads,
                     num_key_value_heads=options.kv_heads, intermediate_size=options.ffn, vocab_size=options.vocab,
                     max_position_embeddings=max(512, options.sequence), tie_word_embeddings=False, use_cache=False,
                     attn_implementation="sdpa")
dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[options.dtype]


class Stage(torch.nn.Module):
    """The layers of one place of a Llama, in its forward's words."""

    def __init__(self, whole):
        super().__init__()
        first, end = (options.layers * place // places for place in (rank, rank + 1))
        self.embedding = whole.model.embed_tokens if rank == 0 else None
        self.layers = whole.model.layers[first:end]
        self.rotary = whole.model.rotary_emb
        self.norm, self.head = (whole.model.norm, whole.lm_head) if rank == places - 1 else (None, None)

    def forward(self, stream):
        if self.embedding is not None:
            stream = self.embedding(stream)
        positions = torch.arange(stream.shape[1]).unsqueeze(0)
        rotation = self.rotary(stream, position_ids=positions)
        for layer in self.layers:
            # Without a mask, attention over whole sequences is causal.
            stream = layer(stream, attention_mask=None, position_ids=positions, position_embeddings=rotation)
        return stream if self.head is None else self.head(self.norm(stream))


def loss_of(logits, labels):
    """As transformers' own: in f32, every token but the last predicts the next one."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


library_bytes = peak_bytes()
# The rest of the whole model is freed.
module = Stage(LlamaForCausalLM(config)).to(dtype)
optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=options.fused or None)
stage = PipelineStage(module, rank, places, torch.device("cpu"))
schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[options.order](stage, options.micros, loss_fn=loss_of)


def train(ids):
    """The loss at the last place, nothing at the others."""
    given = (ids,) if rank == 0 else ()
    losses = []
    if rank == places - 1:
        schedule.step(*given, target=ids, losses=losses, return_outputs=False)
    else:
        schedule.step(*given, return_outputs=False)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses).mean().item() if losses else None


seconds, losses = [], []
for step in range(options.warmup + options.steps):
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, options.vocab, (options.batch, options.sequence), generator=generator)
    torch.distributed.barrier()
    start = time.perf_counter()
    losses.append(train(ids))
    seconds.append(time.perf_counter() - start)

own = {"seconds": seconds[options.warmup:], "losses": losses[options.warmup:],
       "peak_process_bytes": peak_bytes()}
all_places = [None] * places
torch.distributed.all_gather_object(all_places, own)
if rank == 0:
    # A step ends with its last place.
    timed = [max(of_step) for of_step in zip(*(place["seconds"] for place in all_places))]
    median = statistics.median(timed)
    print(json.dumps({
        "order": options.order, "dtype": options.dtype, "pp": places, "threads": torch.get_num_threads(),
        "micros": options.micros, "steps": len(timed), "median_step_s": median, "min_step_s": min(timed),
        "tokens_per_s": options.batch * options.sequence / median,
        "peak_process_bytes": [place["peak_process_bytes"] for place in all_places],
        "library_bytes": library_bytes,
        "first_loss": all_places[-1]["losses"][0], "last_loss": all_places[-1]["losses"][-1], "torch": torch.__version__,
    }))
torch.distributed.destroy_process_group()
