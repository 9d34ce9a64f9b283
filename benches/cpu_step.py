#!/usr/bin/env python3
"""CPU time of one training step on one core: ours, canonical and fast, beside PyTorch eager, in one run.

    python3 benches/cpu_step.py

builds the bench, makes a virtual environment with PyTorch under target/ (or takes --torch-python), and lets all sides step
in turn, each when it is told to, pinned to one core. The CPU clock of each process is read around its step. A fourth process
makes nothing but the matrix products of our step, with the library that we use: the ceiling. Model: 4 layers,
hidden 256, 4 heads, 4 samples of 256 tokens, f32, AdamW, clip 1; as `llama` with SwiGLU 688, RMSNorm, rotary positions, 257 ids
(padded in memory on our side only, to 384 and in canonical numerics to 512), as `gpt2` with GELU 1,024, LayerNorm, learned
positions, biases and a tied head of 1,024 ids. Prints a table and writes it to benches/results/.
"""
import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYERS, HIDDEN, HEADS, SEQ, BATCH = 4, 256, 4, 256, 4
WARM_UP = 3
FFN = {"llama": 688, "gpt2": 1024}
VOCAB = {"llama": 257, "gpt2": 1024}
# Of the matrix products of a step, three for each weight; attention over half of all pairs, two products and five in backward.
def gflop(model):
    mlp = (3 if model == "llama" else 2) * FFN[model]
    weights = HIDDEN * (LAYERS * (4 * HIDDEN + mlp) + VOCAB[model])
    return 1e-9 * (6 * BATCH * SEQ * weights + 7 * LAYERS * BATCH * SEQ * SEQ * HIDDEN)


def torch_side(name):
    """Answers each line on the standard input with the loss of one more step."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, ffn, vocab, llama = HIDDEN // HEADS, FFN[name], VOCAB[name], name == "llama"
    norm = nn.RMSNorm if llama else nn.LayerNorm
    angles = torch.outer(torch.arange(SEQ), 10000.0 ** (-torch.arange(0, width, 2) / width))
    cos, sin = angles.cos(), angles.sin()

    def rotate(x):
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = norm(HIDDEN, 1e-5), norm(HIDDEN, 1e-5)
            self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=not llama)
            self.proj = nn.Linear(HIDDEN, HIDDEN, bias=not llama)
            self.fc1 = nn.Linear(HIDDEN, 2 * ffn if llama else ffn, bias=not llama)
            self.fc2 = nn.Linear(ffn, HIDDEN, bias=not llama)

        def forward(self, x):
            q, k, v = self.qkv(self.norm1(x)).view(BATCH, SEQ, 3, HEADS, width).permute(2, 0, 3, 1, 4)
            if llama:
                q, k = rotate(q), rotate(k)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(out.transpose(1, 2).reshape(BATCH, SEQ, HIDDEN))
            inner = self.fc1(self.norm2(x))
            if llama:
                gate, up = inner.chunk(2, -1)
                return x + self.fc2(F.silu(gate) * up)
            return x + self.fc2(F.gelu(inner, approximate="tanh"))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(vocab, HIDDEN)
            self.positions = None if llama else nn.Embedding(SEQ, HIDDEN)
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
            self.norm = norm(HIDDEN, 1e-5)
            self.output = nn.Linear(HIDDEN, vocab, bias=False)
            if not llama:
                self.output.weight = self.embedding.weight
            for name, weight in self.named_parameters():
                if weight.dim() > 1:
                    into_residual = "proj" in name or "fc2" in name
                    nn.init.normal_(weight, std=0.02 / (2 * LAYERS) ** 0.5 if into_residual else 0.02)

        def forward(self, tokens):
            x = self.embedding(tokens)
            if not llama:
                x = x + self.positions.weight
            for layer in self.layers:
                x = layer(x)
            return self.output(self.norm(x))

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    at = torch.arange(BATCH * SEQ + 1)
    tokens = (at * at * 7 + at * 3 + (at >> 3)) % vocab
    inputs, targets = tokens[:-1].view(BATCH, SEQ), tokens[1:]
    print(torch.__version__, flush=True)
    for _ in sys.stdin:
        loss = F.cross_entropy(model(inputs).reshape(-1, vocab), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(loss.item(), flush=True)


class Side:
    """A process that makes a step when it is told to."""

    def __init__(self, command, core):
        pin = lambda: os.sched_setaffinity(0, {core})
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, preexec_fn=pin)
        self.hello = self.process.stdout.readline().strip()
        # The CPU clock of another process, as clock_getcpuclockid(3) gives it.
        self.clock = (~self.process.pid << 3) | 2
        self.milliseconds = []

    def step(self):
        start = time.clock_gettime(self.clock)
        self.process.stdin.write("\n")
        self.loss = float(self.process.stdout.readline())
        self.milliseconds.append((time.clock_gettime(self.clock) - start) * 1e3)


def torch_python():
    home = ROOT / "target" / "bench-venv"
    if not home.exists():
        venv.create(home, with_pip=True)
        subprocess.run([home / "bin/pip", "install", "--quiet", "torch", "numpy"], check=True)
    return home / "bin/python"


def build():
    command = ["cargo", "build", "--locked", "--profile", "measure", "--bench", "cpu_step", "--message-format", "json"]
    lines = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    built = (json.loads(line) for line in lines)
    return next(b["executable"] for b in built if b.get("executable") and b["target"]["name"] == "cpu_step")


def measure(model, args, ours, python):
    """Lets all sides step in turn; the rows of the table."""
    sides = {
        "PyTorch eager": Side([python, __file__, "--torch-side", model], args.core),
        f"canonical, leaf {args.leaf}": Side([ours, model, "canonical", args.leaf], args.core),
        "fast": Side([ours, model, "fast"], args.core),
        "matrix products alone": Side([ours, model, "products"], args.core),
    }
    for _ in range(WARM_UP + args.steps):
        for side in sides.values():
            side.step()
    rows = {}
    for name, side in sides.items():
        milliseconds = side.milliseconds[WARM_UP:]
        best, median = min(milliseconds), statistics.median(milliseconds)
        torch = rows.get("PyTorch eager", {"best_ms": best, "median_ms": median})
        rows[name] = {
            "best_ms": best,
            "median_ms": median,
            "best_ratio": best / torch["best_ms"],
            "median_ratio": median / torch["median_ms"],
            "gflops": gflop(model) / best * 1e3,
            "loss": side.loss,
        }
        side.process.stdin.close()
        side.process.wait()
    return rows, sides["PyTorch eager"].hello


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help=f"steps of each side that count, after {WARM_UP} that do not")
    parser.add_argument("--leaf", default="64", help="tokens of a leaf in canonical numerics")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--torch-python", help="a Python that has PyTorch; otherwise an environment is made")
    parser.add_argument("--torch-side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torch_side:
        return torch_side(args.torch_side)
    ours = build()
    python = args.torch_python or torch_python()
    document, text = {}, ""
    for model in FFN:
        rows, version = measure(model, args, ours, python)
        document[model] = rows
        names = [model, "best ms", "median ms", "best ÷ PyTorch", "median ÷ PyTorch", "GFLOP/s", "last loss"]
        text += f"| {' | '.join(names)} |\n" + "|---" * len(names) + "|\n"
        for name, row in rows.items():
            text += (
                f"| {name} | {row['best_ms']:.1f} | {row['median_ms']:.1f} | {row['best_ratio']:.3f} "
                f"| {row['median_ratio']:.3f} | {row['gflops']:.0f} | {row['loss']:.4f} |\n"
            )
        text += "\n"
    cpu = next(line for line in open("/proc/cpuinfo") if line.startswith("model name")).split(":")[1].strip()
    document["conditions"] = (
        f"{args.steps} steps a side in turn, CPU-ms of core {args.core} of {os.cpu_count()} ({cpu}), "
        f"load average {os.getloadavg()[0]:.1f}, PyTorch {version}"
    )
    text = f"{document['conditions']}\n\n{text}"
    print(text)
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d-%H%M")
    result = ROOT / "benches" / "results" / f"cpu-step-{stamp}"
    result.parent.mkdir(exist_ok=True)
    result.with_suffix(".md").write_text(f"# CPU step, {stamp} UTC\n\n{text}")
    result.with_suffix(".json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
