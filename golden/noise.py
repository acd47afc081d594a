"""Dropout for Hugging Face's modules with the random numbers that Evenkeel draws.

A number's place is its site in the model, the row of its token among all tokens, and its column. The generator is
described in crates/device/src/cpu/random.rs, that of attention's weights in crates/device/src/cpu/attention/dropout.rs,
the sites in crates/model/src/chain/dropout.rs.
"""

import contextlib

import numpy
import torch

GOLDEN = 0x9E3779B97F4A7C15
BITS = 2**64 - 1
ENTRY, ATTENTION_WEIGHTS, ATTENTION_OUTPUT, MLP_OUTPUT = range(4)
FIRST_TOKENS, POOLED = 2**31, 2**31 + 1


def mix(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & BITS
    x = (x ^ x >> 27) * 0x94D049BB133111EB & BITS
    return x ^ x >> 31


def seed_of(seed, number):
    return mix(seed + GOLDEN * (number + 1) & BITS)


def uniform(key, cols):
    """A row of numbers in 0..1: steps, and how many there are to 1."""
    x = numpy.arange(cols, dtype=numpy.uint32) + numpy.uint32(key & 0xFFFFFFFF)
    x = (x ^ x >> 17) * numpy.uint32(0xED5AD4BB) + numpy.uint32(key >> 32)
    x = (x ^ x >> 11) * numpy.uint32(0xAC4C1B51)
    x = (x ^ x >> 15) * numpy.uint32(0x31848BAB)
    return (x ^ x >> 14) >> 8, 2**24


def weight_bits(key, keys):
    """Sixteen bits of a query for each key of its segment: two keys, eight apart, share a word."""
    key_numbers = numpy.arange(keys, dtype=numpy.uint32)
    x = key_numbers // 16 * 8 + key_numbers % 8 + numpy.uint32(key & 0xFFFFFFFF)
    x = (x ^ x >> 16) * numpy.uint32(0x7FEB352D) + numpy.uint32(key >> 32)
    x = (x ^ x >> 15) * numpy.uint32(0x846CA68B)
    return numpy.where(key_numbers % 16 < 8, x >> 16, (x ^ x << 16) >> 16), 2**16


def kept_rows(seed, first_token, tokens, cols, p):
    """Which numbers of the site with this seed stay, [tokens, cols]."""
    seed = seed_of(seed, 0)
    rows = numpy.empty((tokens, cols), dtype=bool)
    for row in range(tokens):
        steps, all_steps = uniform(seed_of(seed, first_token + row), cols)
        rows[row] = steps >= p * all_steps
    return rows


class Noise:
    """Takes the place of `torch.nn.functional.dropout`. Modules call it in the order in which they compute."""

    def __init__(self, seed, first_token, parallel, of_texts):
        self.seed, self.next_token, self.parallel = seed, first_token, parallel
        self.of_texts = list(of_texts)

    def begin(self, *_):
        """A pass over tokens that follow those of the last one."""
        self.first_token, self.layer, self.outputs = self.next_token, -1, 0
        self.left = list(self.of_texts)

    def dropout(self, x, p=0.5, training=True, inplace=False):
        assert training and not inplace
        is_kept = self.of_weights(x.shape, p) if x.dim() == 4 else self.of_hidden(x.shape, p)
        return x * torch.from_numpy(is_kept).reshape(x.shape) * (1 / (1 - p))

    def of_weights(self, shape, p):
        """[B, heads, queries, keys]"""
        self.layer, self.outputs = self.layer + 1, 0
        sequences, heads, queries, keys = shape
        seed = seed_of(self.seed, 4 * self.layer + ATTENTION_WEIGHTS)
        self.next_token = self.first_token + sequences * queries
        rows = numpy.empty(shape, dtype=bool)
        for b, h, q in numpy.ndindex(sequences, heads, queries):
            key = seed_of(seed_of(seed, h), self.first_token + b * queries + q)
            steps, all_steps = weight_bits(key, keys)
            rows[b, h, q] = steps >= p * all_steps
        return rows

    def of_hidden(self, shape, p):
        """[..., hidden]: the embeddings, then each layer's two outputs; then, of a text, what its label follows from."""
        self.outputs += 1
        if len(shape) == 2:
            seed = seed_of(self.seed, self.left.pop(0))
            return kept_rows(seed, self.first_token, 1, shape[-1], p)
        if self.layer < 0:
            site = 4 * 1 + ENTRY
        elif self.parallel:
            site = 4 * self.layer + (ATTENTION_OUTPUT if self.outputs == 1 else MLP_OUTPUT)
        else:
            # What a sublayer adds is dropped where the next unit begins; the first layer's attention is unit 1.
            site = 4 * (1 + 2 * self.layer + self.outputs) + ENTRY
        return kept_rows(seed_of(self.seed, site), self.first_token, shape[:-1].numel(), shape[-1], p)


@contextlib.contextmanager
def noisy(model, seed, first_token):
    """The model in training, its dropout by seed and place. Its passes follow one another."""
    parallel = getattr(model.config, "use_parallel_residual", model.config.model_type == "gptj")
    of_texts = {"bert": [POOLED], "roberta": [FIRST_TOKENS, POOLED]}.get(model.config.model_type, [])
    noise = Noise(seed, first_token, parallel, of_texts)
    hook = model.register_forward_pre_hook(noise.begin)
    original, torch.nn.functional.dropout = torch.nn.functional.dropout, noise.dropout
    model.train()
    try:
        yield
    finally:
        torch.nn.functional.dropout = original
        hook.remove()
        model.eval()
