#!/usr/bin/env python3
"""Compares a --dump of ./train, tensor by tensor, with the same iteration in PyTorch (Hugging Face GPT-2, float64).

Usage: python compare.py DUMP_DIR HEADS

The dump must come from a run with dropout 0. PyTorch takes the dump's weights and tokens; each layer's output, the loss and
every gradient are compared: the largest difference over the largest value of each is printed, and the exit status is 1 if any
exceeds 1e-5. Needs torch, transformers and safetensors (golden/requirements.txt).
"""

import sys

import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel


def main():
    dump, heads = load_file(sys.argv[1] + "/dump.safetensors"), int(sys.argv[2])
    weights = {name: value.double() for name, value in dump.items()
               if not name.startswith("gradient.") and not name.endswith(".output") and name not in ("tokens", "loss")}
    vocab, hidden = weights["wte.weight"].shape
    layers = sum(name.endswith(".ln_1.weight") for name in weights)
    config = GPT2Config(vocab_size=vocab, n_positions=weights["wpe.weight"].shape[0], n_embd=hidden, n_layer=layers, n_head=heads,
                        activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                        attn_implementation="eager")
    model = GPT2LMHeadModel(config).double()
    model.transformer.load_state_dict(weights)
    outputs = {}
    for i, layer in enumerate(model.transformer.h):
        layer.register_forward_hook(
            lambda module, inputs, output, i=i: outputs.__setitem__(i, output[0] if isinstance(output, tuple) else output))
    tokens = dump["tokens"].long()
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()

    worst = 0.0

    def compare(name, ours, theirs):
        nonlocal worst
        largest = theirs.abs().max().item()
        difference = (ours.double() - theirs).abs().max().item() / (largest if largest > 0 else 1.0)
        print(f"{name:40} {difference:.2e}")
        worst = max(worst, difference)

    compare("loss", dump["loss"][0], loss.detach())
    for i in range(layers):
        compare(f"h.{i}.output", dump[f"h.{i}.output"], outputs[i].detach())
    for name, parameter in model.transformer.named_parameters():
        gradient = parameter.grad
        if name.endswith("c_attn.bias"):  # the key part's gradient is zero but for rounding
            keep = torch.ones_like(gradient)
            keep[hidden:2 * hidden] = 0
            compare("gradient." + name, dump["gradient." + name].double() * keep, gradient * keep)
        else:
            compare("gradient." + name, dump["gradient." + name], gradient)
    print(f"largest difference: {worst:.2e}")
    return 0 if worst <= 1e-5 else 1


sys.exit(main())
