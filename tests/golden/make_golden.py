#!/usr/bin/env python3
"""Makes the reference values small.safetensors and wide.safetensors with Hugging Face GPT-2 in float64.

Usage: python make_golden.py (in this directory; requirements.txt lists the versions used).

Each file holds, for one batch of random tokens and a GPT2LMHeadModel with random weights (biases and LayerNorm included):
  tokens  I32 [b, s + 1]   inputs are tokens[:, :-1], targets tokens[:, 1:]
  weight  F32 [P]          every parameter, flattened and concatenated in the order of `names` below
  logits  F32 [b, s, V]
  grad    F32 [P]          of the mean cross-entropy, before clipping
  after   F32 [P]          the weights after 5 AdamW steps on the same batch, gradients clipped to a global norm of 1
and as metadata the configuration, the loss, the gradient norm, and the losses of the 5 steps. Weights are concatenated, not
stored by name, to keep both files under 4 MB together.
"""

import json

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import GPT2Config, GPT2LMHeadModel

LR, BETAS, EPS, DECAY, CLIP, STEPS = 3e-4, (0.9, 0.999), 1e-8, 0.01, 1.0, 5


def names(layers):
    """Hugging Face's parameter names, without the prefix `transformer.`, in the order in which the files hold them."""
    per_layer = ["ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias",
                 "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"]
    return (["wte.weight", "wpe.weight"] + [f"h.{i}.{name}" for i in range(layers) for name in per_layer] +
            ["ln_f.weight", "ln_f.bias"])


def make(path, layers, hidden, heads, sequence, vocab, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    config = GPT2Config(vocab_size=vocab, n_positions=sequence, n_embd=hidden, n_layer=layers, n_head=heads,
                        activation_function="gelu_new", layer_norm_epsilon=1e-5, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_pdrop=0.0, tie_word_embeddings=True, attn_implementation="eager")
    model = GPT2LMHeadModel(config).double()
    parameters = [dict(model.transformer.named_parameters())[name] for name in names(layers)]
    assert sum(p.numel() for p in parameters) == sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        for name, p in zip(names(layers), parameters):
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            is_norm = ".ln_" in name or name.startswith("ln_")
            if is_norm and name.endswith("weight"):
                value = 1 + 0.1 * noise
            elif p.dim() == 1:
                value = 0.1 * noise
            else:
                value = (0.12 if name in ("wte.weight", "wpe.weight") else 0.08) * noise
            p.copy_(value.float().double())  # exactly representable in the file
    tokens = torch.randint(0, vocab, (batch, sequence + 1), generator=generator)

    def loss_and_logits():
        logits = model(tokens[:, :-1]).logits
        # The library's own loss casts to float32 and shifts the targets once more
        return torch.nn.functional.cross_entropy(logits.reshape(-1, vocab), tokens[:, 1:].reshape(-1)), logits

    flat = lambda tensors: torch.cat([t.detach().reshape(-1) for t in tensors]).numpy().astype(np.float32)
    arrays = {"tokens": tokens.numpy().astype(np.int32), "weight": flat(parameters)}
    optimizer = torch.optim.AdamW([{"params": [p for p in parameters if p.dim() == 2], "weight_decay": DECAY},
                                   {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0}],
                                  lr=LR, betas=BETAS, eps=EPS)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, logits = loss_and_logits()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.sqrt(sum((p.grad ** 2).sum() for p in parameters)).item())
        if step == 0:
            arrays["logits"] = logits.detach().numpy().astype(np.float32)
            arrays["grad"] = flat(p.grad for p in parameters)
            # The gradient against differences of the loss, so that this script checks itself
            with torch.no_grad():
                for p in parameters[:: max(1, len(parameters) // 7)]:
                    index = tuple(int(torch.randint(0, n, (1,), generator=generator)) for n in p.shape)
                    kept, delta = p[index].item(), 1e-5
                    p[index] = kept + delta
                    above = loss_and_logits()[0].item()
                    p[index] = kept - delta
                    below = loss_and_logits()[0].item()
                    p[index] = kept
                    assert abs((above - below) / (2 * delta) - p.grad[index].item()) < 1e-7
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
    assert norms[0] > 1.1 * CLIP, f"clipping is not active: the gradient norm is {norms[0]}"
    arrays["after"] = flat(parameters)
    metadata = {"layers": layers, "hidden": hidden, "heads": heads, "sequence": sequence, "vocab": vocab, "batch": batch,
                "lr": LR, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "weight_decay": DECAY, "clip": CLIP,
                "loss": losses[0], "grad_norm": norms[0], "losses": losses, "grad_norms": norms, "steps": STEPS}
    save_file(arrays, path, {key: json.dumps(value) for key, value in metadata.items()})
    print(path, "loss", losses[0], "gradient norm", norms[0], "then", losses[-1])


if __name__ == "__main__":
    make("small.safetensors", layers=2, hidden=60, heads=5, sequence=13, vocab=101, batch=3, seed=1)
    make("wide.safetensors", layers=8, hidden=48, heads=24, sequence=16, vocab=101, batch=8, seed=2)
