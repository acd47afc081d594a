"""Jet-Nemotron as plainly as possible: its own code needs a GPU and leaks between documents in training.

Shapes: B sequences, T tokens, N heads, D elements of a head, W taps of a convolution.
"""

import torch
from torch import nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention, silu, softplus
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class JetConfig(PreTrainedConfig):
    model_type = "jet_nemotron"

    def validate(self):
        """transformers knows other types of layers."""


class Norm(nn.Module):
    def __init__(self, size, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)


class Attention(nn.Module):
    def __init__(self, config, window):
        super().__init__()
        self.heads, self.groups, self.base = config.num_attention_heads, config.num_key_value_heads, config.rope_theta
        self.dim = config.hidden_size // self.heads
        self.window = window
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.dim)
        self.k_proj = nn.Linear(config.hidden_size, self.groups * self.dim)
        self.v_proj = nn.Linear(config.hidden_size, self.groups * self.dim)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)

    def forward(self, x):
        tokens = x.shape[1]
        place = torch.arange(tokens)
        distance = place[:, None] - place[None, :]
        visible = (distance >= 0) & (distance < self.window)
        q, k, v = (self.split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotate(q), self.rotate(k)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)  # [B, N, T, D]
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def split(self, x):
        return x.unflatten(-1, (-1, self.dim)).transpose(1, 2)  # [B, N, T, D]

    def rotate(self, x):
        frequency = self.base ** (-torch.arange(0, self.dim, 2) / self.dim)
        angle = torch.arange(x.shape[2])[:, None] * frequency  # [T, D / 2]
        first, second = x.chunk(2, -1)
        return torch.cat(
            (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
        )


class Generator(nn.Module):
    def __init__(self, inputs, width, outputs):
        super().__init__()
        self.w1 = nn.Linear(inputs, width, bias=False)
        self.w2 = nn.Linear(width, outputs)

    def forward(self, x):
        return self.w2(silu(self.w1(x)))


class DynamicConvolution(nn.Module):
    def __init__(self, hidden, features, taps, reduction):
        super().__init__()
        self.taps = taps
        self.kernel_generator = Generator(hidden, features // reduction, features * taps)

    def forward(self, x, hidden):
        weights = self.kernel_generator(hidden).unflatten(-1, (-1, self.taps))  # [B, T, features, W]
        windows = pad(x, (0, 0, self.taps - 1, 0)).unfold(1, self.taps, 1)  # [B, T, features, W]
        return silu((windows * weights).sum(-1))


class GatedNorm(Norm):
    def forward(self, x, gate):
        return super().forward(x) * silu(gate)


class JetBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        jet = config.efficient_attention_config["jet"]
        hidden, self.heads, key_dim = config.hidden_size, jet["num_heads"], jet["head_dim"]
        value_dim = int(key_dim * jet["expand_v"])
        keys, values = self.heads * key_dim, self.heads * value_dim
        self.q_proj = nn.Linear(hidden, keys, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, values, bias=False)
        self.b_proj = nn.Linear(hidden, self.heads, bias=False)
        self.a_proj = nn.Linear(hidden, self.heads, bias=False)
        self.A_log = nn.Parameter(torch.linspace(-2, 1, self.heads))
        self.dt_bias = nn.Parameter(torch.linspace(-1, 1, self.heads))
        self.dynamic_conv1d = DynamicConvolution(hidden, values, jet["conv_size"], jet["dconv_generator_reduction"])
        self.g_proj = nn.Linear(hidden, values, bias=False)
        self.o_norm = GatedNorm(value_dim, float(jet["norm_eps"]))
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x):
        by_head = lambda features: features.unflatten(-1, (self.heads, -1))  # [B, T, N, D]
        unit = lambda rows: rows * torch.rsqrt(rows.pow(2).sum(-1, keepdim=True) + 1e-6)
        q, k = unit(by_head(silu(self.q_proj(x)))), unit(by_head(silu(self.k_proj(x))))
        v = by_head(self.dynamic_conv1d(self.v_proj(x), x))
        taken = self.b_proj(x).sigmoid()  # [B, T, N]
        kept = (-self.A_log.exp() * softplus(self.a_proj(x) + self.dt_bias)).exp()
        state = x.new_zeros(x.shape[0], self.heads, k.shape[-1], v.shape[-1])
        rows = []
        for t in range(x.shape[1]):
            state = state * kept[:, t, :, None, None]
            known = torch.einsum("bnkv,bnk->bnv", state, k[:, t])
            state = state + torch.einsum("bnk,bnv->bnkv", k[:, t], taken[:, t, :, None] * (v[:, t] - known))
            rows.append(torch.einsum("bnkv,bnk->bnv", state, q[:, t] * k.shape[-1] ** -0.5))
        out = self.o_norm(torch.stack(rows, 1), by_head(self.g_proj(x)))
        return self.o_proj(out.flatten(2))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config, kind):
        super().__init__()
        windows = {"attn": 1 << 30, "swa": config.efficient_attention_config["swa"]["window_size"]}
        self.self_attn = JetBlock(config) if kind == "jet" else Attention(config, windows[kind])
        self.mlp = Mlp(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class JetNemotronForCausalLM(PreTrainedModel):
    config_class = JetConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = Trunk(config)
        self.post_init()

    @classmethod
    def from_config(cls, config, **options):
        return cls(config)

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, use_cache=False):
        x = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x = layer(x)
        return CausalLMOutput(logits=linear(self.model.norm(x), self.model.embed_tokens.weight))
