#!/usr/bin/env python3
"""Makes small token files in the formats of Megatron-LM (MMapIndexedDataset) and llm.c, as their published sources describe them.

Usage: python make_tokens.py (in this directory; needs nothing but Python). Token k of every file is (31 k^2 + 7 k) mod 50257.
"""

import struct

COUNT = 300
TOKENS = [(31 * k * k + 7 * k) % 50257 for k in range(COUNT)]


def megatron(path, code, letter):
    """Sequences of 1, 2, ... tokens, two a document; `code` is the index's number for the type, `letter` struct's."""
    sizes, left = [], COUNT
    while left > 0:
        sizes.append(min(len(sizes) + 1, left))
        left -= sizes[-1]
    width = struct.calcsize("<" + letter)
    places = [width * sum(sizes[:i]) for i in range(len(sizes))]
    documents = list(range(0, len(sizes), 2)) + [len(sizes)]
    with open(path + ".bin", "wb") as file:
        file.write(struct.pack(f"<{COUNT}{letter}", *TOKENS))
    with open(path + ".idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00")
        file.write(struct.pack("<QBQQ", 1, code, len(sizes), len(documents)))
        file.write(struct.pack(f"<{len(sizes)}i", *sizes))
        file.write(struct.pack(f"<{len(places)}q", *places))
        file.write(struct.pack(f"<{len(documents)}q", *documents))


def llmc(path):
    """256 int32 of header (magic, version, number of tokens), then uint16 tokens."""
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, COUNT, *([0] * 253)))
        file.write(struct.pack(f"<{COUNT}H", *TOKENS))


megatron("megatron-uint16", 8, "H")
megatron("megatron-int32", 4, "i")
llmc("llmc.bin")
