#!/usr/bin/env python3
"""Takes a model from Hugging Face transformers into ./train and back, in several layouts.

Usage: python check_hf.py TRAIN MPIRUN (paths of the programs)

A GPT2LMHeadModel with random weights is saved by transformers, loaded with --load-hf, run for an iteration at learning rate 0 with
--dump, and written with --save-hf. Every weight must come through unchanged, each layer's output and the loss must agree within
1e-5, and what --save-hf wrote must load in transformers and give the same logits. Needs golden/requirements.txt.
"""

import os
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel


def relative(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def main():
    train, mpirun = sys.argv[1], sys.argv[2]
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=131, n_positions=24, n_embd=40, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="eager")
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    with tempfile.TemporaryDirectory() as directory:
        theirs, text = os.path.join(directory, "theirs"), os.path.join(directory, "text")
        model.save_pretrained(theirs)
        with open(text, "wb") as file:
            file.write(bytes(i * i % 131 for i in range(2000)))
        for ranks, layout in [(1, []), (2, ["--tp", "2"]), (2, ["--pp", "2"]), (8, ["--tp", "2", "--pp", "2", "--vp", "2"])]:
            ours, dump = os.path.join(directory, "ours"), os.path.join(directory, "dump")
            subprocess.run([mpirun, "-np", str(ranks), train, "--data-path", text, "--load-hf", theirs, "--save-hf", ours, "--dump", dump,
                            "--train-iters", "1", "--lr", "0", "--micro-batch-size", "1", "--global-batch-size", "8", "--eval-iters", "0",
                            "--hidden-dropout", "0", "--attention-dropout", "0"] + layout, check=True, stdout=subprocess.DEVNULL)
            dumped = load_file(os.path.join(dump, "dump.safetensors"))
            for name, parameter in model.transformer.named_parameters():
                assert torch.equal(dumped[name], parameter), f"{name} is not the model's"
            back = GPT2LMHeadModel.from_pretrained(ours, attn_implementation="eager")
            for (name, parameter), other in zip(model.named_parameters(), back.parameters()):
                assert torch.equal(parameter, other), f"{name} came back changed"
            outputs = {}
            for i, layer in enumerate(back.transformer.h):
                layer.register_forward_hook(
                    lambda module, inputs, output, i=i: outputs.__setitem__(i, output[0] if isinstance(output, tuple) else output))
            tokens = dumped["tokens"].long()
            with torch.no_grad():
                logits, expected = back(tokens[:, :-1]).logits, model(tokens[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), tokens[:, 1:].flatten())
            worst = max([relative(dumped[f"h.{i}.output"], outputs[i]) for i in range(4)] +
                        [abs(dumped["loss"].item() / loss.item() - 1), relative(logits, expected)])
            print(f"{ranks} ranks {' '.join(layout)}: largest difference {worst:.2e}")
            assert worst <= 1e-5


main()
