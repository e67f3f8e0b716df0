"""The same training iteration in PyTorch, for make bench: prints the median seconds of one.

    torch_gpt.py CORES DROPOUT ITERATIONS --num-layers L --hidden-size H --num-attention-heads A --seq-length S
                 --micro-batch-size B [--vocab-size V]

GPT-2 with tied embeddings on random tokens, fp32; forward, backward, clipping at norm 1 and an AdamW step. Attention is
PyTorch's own fused one where it has it, else written out.
"""
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, h, heads, s, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.projection = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.fc, self.fc_projection = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        self.register_buffer("mask", torch.ones(s, s, dtype=torch.bool).triu(1))

    def attention(self, x):
        b, s, h = x.shape
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(h, dim=2))
        if hasattr(F, "scaled_dot_product_attention"):
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        else:
            scores = (q @ k.transpose(2, 3)) * (h // self.heads) ** -0.5
            weights = scores.masked_fill(self.mask, float("-inf")).softmax(dim=-1)
            out = F.dropout(weights, self.dropout) @ v
        return self.projection(out.transpose(1, 2).reshape(b, s, h))

    def forward(self, x):
        x = x + F.dropout(self.attention(self.ln_1(x)), self.dropout)
        return x + F.dropout(self.fc_projection(F.gelu(self.fc(self.ln_2(x)), approximate="tanh")), self.dropout)


class Gpt(nn.Module):
    def __init__(self, layers, h, heads, s, vocab, dropout):
        super().__init__()
        self.dropout = dropout
        self.wte, self.wpe = nn.Embedding(vocab, h), nn.Embedding(s, h)
        self.layers = nn.ModuleList(Layer(h, heads, s, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(h)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)

    def forward(self, inputs, targets):
        x = F.dropout(self.wte(inputs) + self.wpe.weight[: inputs.shape[1]], self.dropout)
        for layer in self.layers:
            x = layer(x)
        logits = self.ln_f(x) @ self.wte.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    cores, dropout, iterations = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    flags = dict(zip(sys.argv[4::2], map(int, sys.argv[5::2])))
    s, b, vocab = flags["--seq-length"], flags["--micro-batch-size"], flags.get("--vocab-size", 256)
    torch.set_num_threads(cores)
    torch.manual_seed(1)
    model = Gpt(flags["--num-layers"], flags["--hidden-size"], flags["--num-attention-heads"], s, vocab, dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    seconds = []
    for _ in range(iterations + 1):
        tokens = torch.randint(vocab, (b, s + 1))
        start = time.perf_counter()
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    print(statistics.median(seconds[1:]))


main()
