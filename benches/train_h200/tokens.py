"""Random tokens as PREFIX.bin and PREFIX.idx: python3 tokens.py PREFIX VOCAB COUNT"""
import random, struct, sys
import numpy as np
prefix, vocab, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
np.random.default_rng(1).integers(0, vocab, count, dtype=np.uint16).tofile(prefix + ".bin")
with open(prefix + ".idx", "wb") as f:
    f.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2))
    f.write(np.array([count], np.int32).tobytes() + np.array([0], np.int64).tobytes() + np.array([0, 1], np.int64).tobytes())
