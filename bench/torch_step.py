"""Training steps of a random Llama in PyTorch, as a user of transformers writes them. Prints one JSON object.

Needs torch and transformers, and peft for --lora. Threads come from OMP_NUM_THREADS. With --tp, ranks started by torchrun share the model, by
transformers' own tp_plan or by DeepSpeed's AutoTP (which needs deepspeed); with --dp, they share each step's batch, by
PyTorch's DDP or FSDP2. Rank 0 prints.
"""
import argparse
import json
import os
import resource
import statistics
import tempfile
import time

import torch
import torch.distributed
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
for name, default in dict(hidden=512, layers=4, heads=8, kv_heads=4, ffn=1408, vocab=4096, batch=4, sequence=256,
                          steps=12, warmup=3).items():
    parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
parser.add_argument("--fused", action="store_true", help="AdamW in one kernel instead of PyTorch's default")
parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
parser.add_argument("--lora", type=int, metavar="RANK", help="adapters by PEFT on all linear layers, instead of the model")
parser.add_argument("--tp", choices=["transformers", "deepspeed"], help="how several ranks share the model")
parser.add_argument("--dp", choices=["ddp", "fsdp2"], help="how several ranks share the batch")
options = parser.parse_args()

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count())))
torch.manual_seed(0)
config = LlamaConfig(hidden_size=options.hidden, num_hidden_layers=options.layers, num_attention_heads=options.heads,
                     num_key_value_heads=options.kv_heads, intermediate_size=options.ffn, vocab_size=options.vocab,
                     max_position_embeddings=max(512, options.sequence), tie_word_embeddings=False, use_cache=False,
                     attn_implementation="sdpa")
dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[options.dtype]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01,
                             fused=options.fused or None)


engine = None
if options.tp == "transformers":
    torch.distributed.init_process_group("gloo")
    folder = os.path.join(tempfile.gettempdir(), f"bench-llama-{options.hidden}-{options.layers}")
    if torch.distributed.get_rank() == 0:
        LlamaForCausalLM(config).save_pretrained(folder)
    torch.distributed.barrier()
    model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=dtype)
    optimizer = adamw(model)
elif options.tp == "deepspeed":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    deepspeed.init_distributed(dist_backend="gloo")
    model = LlamaForCausalLM(config).to(dtype)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config={
        "train_micro_batch_size_per_gpu": options.batch, "steps_per_print": 10**9, "gradient_clipping": 0.0,
        "bf16": {"enabled": options.dtype == "bf16"},
        "tensor_parallel": {"autotp_size": torch.distributed.get_world_size()},
    })
elif options.dp == "ddp":
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(LlamaForCausalLM(config).to(dtype))
    optimizer = adamw(model)
elif options.dp == "fsdp2":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = LlamaForCausalLM(config).to(dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
else:
    model = LlamaForCausalLM(config).to(dtype)
    if options.lora:
        from peft import LoraConfig, get_peft_model
        adapter = LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear")
        model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    optimizer = adamw(model)


def own(ids):
    """This rank's sequences of a step."""
    return ids.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()] if options.dp else ids


def train(ids):
    if engine:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    else:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


seconds, losses = [], []
for step in range(options.warmup + options.steps):
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, options.vocab, (options.batch, options.sequence), generator=generator)
    start = time.perf_counter()
    losses.append(train(own(ids)))
    seconds.append(time.perf_counter() - start)

timed = seconds[options.warmup:]
median = statistics.median(timed)
if int(os.environ.get("RANK", 0)) == 0:
    print(json.dumps({
        "dtype": options.dtype, "threads": torch.get_num_threads(), "steps": len(timed), "median_step_s": median,
        "min_step_s": min(timed), "tokens_per_s": options.batch * options.sequence / median,
        "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "first_loss": losses[options.warmup], "last_loss": losses[-1], "torch": torch.__version__,
    }))
