#!/usr/bin/env python3
"""Training throughput of a plain PyTorch decoder on one GPU: the figure a training system has to answer to.

  python3 torch_decoder.py --model gpt2-124m --exec compile --precision autocast --batch 64

What one step does: forward and backward of next-token cross-entropy in bf16 (fp32 loss), global gradient-norm clip
at 1.0, fused AdamW. Inputs are random tokens. Nothing is skipped or accumulated, and no activation is recomputed.

--precision autocast : fp32 parameters, bf16 autocast (the usual single-GPU recipe)
--precision master   : bf16 parameters and gradients, fp32 master weights and Adam moments (14 B a parameter of state,
                       what a checkpoint of ours holds)
FLOPs a token, printed with every result (N_mm = parameters that are multiplied with activations: all but input
embedding look-ups, position table and norms counted in):
  full   = 6*N_mm + 12*L*d*T   (PaLM's formula: attention not halved for the causal mask)
  causal = 6*N_mm +  6*L*d*T   (only the unmasked half of the attention)
MFU divides by --peak (default 989.5 TFLOP/s, the H200's dense bf16 data-sheet rate).
"""
import argparse
import gc
import math
import os
import statistics
import sys
import tempfile
import time

# A compile cache of our own each run. With a shared one, a run that asked for another attention backend started in 5 s
# instead of 40 and ran at the first one's speed (2026-11-30, torch 2.11), so it was most likely served the cached kernels.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="inductor-"))

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel



def rec(name, unit, vals, **note):
    """Prints median [min .. max] of vals."""
    vals = [float(v) for v in vals]
    if not vals:
        print(f"{name}: no values {note}", flush=True)
        return None
    med = statistics.median(vals)
    extra = " ".join(f"{k}={v}" for k, v in note.items())
    print(f"{name:<58} {med:>10.3f} {unit:<9} [{min(vals):.3f} .. {max(vals):.3f}] n={len(vals)} {extra}", flush=True)
    return med


def versions():
    out = {"python": sys.version.split()[0]}
    try:
        import torch

        out["torch"] = torch.__version__
        if torch.cuda.is_available():
            out["gpu"] = torch.cuda.get_device_name(0)
            out["gpus"] = torch.cuda.device_count()
            out["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            out["cudnn"] = torch.backends.cudnn.version()
    except Exception as e:  # noqa: BLE001
        out["torch"] = repr(e)
    return out

CFG = {
    # name: layers, dim, heads, kv heads, ff, vocab, seq, llama-style?
    "gpt2-124m": dict(L=12, d=768, h=12, kv=12, ff=3072, V=50304, T=1024, llama=False),
    "llama-1.1b": dict(L=22, d=2048, h=32, kv=4, ff=5632, V=32000, T=4096, llama=True),
    "tiny-gpt2": dict(L=2, d=64, h=2, kv=2, ff=256, V=512, T=64, llama=False),
    "tiny-llama": dict(L=2, d=64, h=4, kv=2, ff=128, V=512, T=64, llama=True),
}


class Attn(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.h, s.kv, s.hd = c["h"], c["kv"], c["d"] // c["h"]
        bias = not c["llama"]
        s.qkv = nn.Linear(c["d"], (s.h + 2 * s.kv) * s.hd, bias=bias)
        s.o = nn.Linear(c["d"], c["d"], bias=bias)

    def forward(s, x, rope):
        B, T, C = x.shape
        q, k, v = s.qkv(x).split([s.h * s.hd, s.kv * s.hd, s.kv * s.hd], -1)
        q = q.view(B, T, s.h, s.hd).transpose(1, 2)
        k = k.view(B, T, s.kv, s.hd).transpose(1, 2)
        v = v.view(B, T, s.kv, s.hd).transpose(1, 2)
        if rope is not None:
            q, k = rot(q, rope), rot(k, rope)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.h != s.kv)
        return s.o(y.transpose(1, 2).reshape(B, T, C))


def rot(x, rope):
    cos, sin = rope
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.llama = c["llama"]
        norm = (lambda: nn.RMSNorm(c["d"], eps=1e-5)) if s.llama else (lambda: nn.LayerNorm(c["d"]))
        s.n1, s.n2, s.attn = norm(), norm(), Attn(c)
        if s.llama:
            s.up = nn.Linear(c["d"], 2 * c["ff"], bias=False)  # gate and up in one product
            s.down = nn.Linear(c["ff"], c["d"], bias=False)
        else:
            s.up = nn.Linear(c["d"], c["ff"])
            s.down = nn.Linear(c["ff"], c["d"])

    def forward(s, x, rope):
        x = x + s.attn(s.n1(x), rope)
        h = s.up(s.n2(x))
        if s.llama:
            g, u = h.chunk(2, -1)
            h = F.silu(g) * u
        else:
            h = F.gelu(h, approximate="tanh")
        return x + s.down(h)


class Decoder(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.c = c
        s.wte = nn.Embedding(c["V"], c["d"])
        s.wpe = None if c["llama"] else nn.Embedding(c["T"], c["d"])
        s.blocks = nn.ModuleList(Block(c) for _ in range(c["L"]))
        s.nf = nn.RMSNorm(c["d"], eps=1e-5) if c["llama"] else nn.LayerNorm(c["d"])
        s.head = nn.Linear(c["d"], c["V"], bias=False)
        if not c["llama"]:
            s.head.weight = s.wte.weight
        for p in s.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.02)
        if c["llama"]:
            hd = c["d"] // c["h"]
            f = 1.0 / (10000 ** (torch.arange(0, hd, 2).float() / hd))
            t = torch.outer(torch.arange(c["T"]).float(), f)
            s.register_buffer("cos", t.cos(), persistent=False)
            s.register_buffer("sin", t.sin(), persistent=False)

    def forward(s, idx, tgt):
        x = s.wte(idx)
        rope = None
        if s.wpe is not None:
            x = x + s.wpe(torch.arange(idx.shape[1], device=idx.device))
        else:
            rope = (s.cos, s.sin)
        for b in s.blocks:
            x = b(x, rope)
        logits = s.head(s.nf(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), tgt.view(-1))


class MasterAdamW:
    """bf16 parameters, fp32 master copy stepped by the fused kernel."""

    def __init__(s, params, **kw):
        s.p = list(params)
        s.m = [p.detach().float().clone().requires_grad_() for p in s.p]
        for m in s.m:
            m.grad = torch.zeros_like(m)
        s.opt = torch.optim.AdamW(s.m, **kw)

    def clip(s):
        torch._foreach_copy_([m.grad for m in s.m], [p.grad for p in s.p])
        torch.nn.utils.clip_grad_norm_(s.m, 1.0, foreach=True)

    def step(s):
        s.opt.step()
        torch._foreach_copy_([p.data for p in s.p], [m.data for m in s.m])

    def zero(s):
        for p in s.p:
            p.grad = None


class PlainAdamW:
    def __init__(s, params, **kw):
        s.p = list(params)
        s.opt = torch.optim.AdamW(s.p, **kw)

    def clip(s):
        torch.nn.utils.clip_grad_norm_(s.p, 1.0, foreach=True)

    def step(s):
        s.opt.step()

    def zero(s):
        s.opt.zero_grad(set_to_none=True)


def run(a, batch):
    c = CFG[a.model]
    dev = a.device
    T = a.seq or c["T"]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    m = Decoder(c).to(dev)
    if a.precision == "master":
        m = m.to(torch.bfloat16)
        if c["llama"]:
            m.cos, m.sin = m.cos.float(), m.sin.float()
    N = sum(p.numel() for p in m.parameters())
    look = m.wpe.weight.numel() if m.wpe is not None else m.wte.weight.numel()
    n_mm = N - look
    full = 6 * n_mm + 12 * c["L"] * c["d"] * T
    causal = 6 * n_mm + 6 * c["L"] * c["d"] * T
    fused = dev == "cuda"
    Opt = MasterAdamW if a.precision == "master" else PlainAdamW
    opt = Opt(m.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    f = torch.compile(m, dynamic=False) if a.exec == "compile" else m
    g = torch.Generator(device="cpu").manual_seed(1)
    data = [torch.randint(0, c["V"], (batch, T + 1), generator=g).to(dev) for _ in range(4)]
    backends = {"flash": [SDPBackend.FLASH_ATTENTION], "cudnn": [SDPBackend.CUDNN_ATTENTION],
                "auto": [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]}[a.attn]

    def step(i):
        b = data[i % 4]
        with sdpa_kernel(backends), torch.autocast(dev, dtype=torch.bfloat16, enabled=a.precision == "autocast"):
            loss = f(b[:, :-1].contiguous(), b[:, 1:].contiguous())
        loss.backward()
        opt.clip()
        opt.step()
        opt.zero()
        return loss.detach()

    cuda = dev == "cuda"
    sync = torch.cuda.synchronize if cuda else (lambda: None)
    t0 = time.time()
    first = step(0)
    sync()
    t_first = time.time() - t0
    for i in range(a.warmup):
        step(i)
    sync()
    steps, t_all = [], time.perf_counter()
    evs = []
    for i in range(a.steps):
        if cuda:
            e0, e1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            e0.record()
            last = step(i)
            e1.record()
            evs.append((e0, e1))
        else:
            t1 = time.perf_counter()
            last = step(i)
            steps.append(time.perf_counter() - t1)
    sync()
    t_all = time.perf_counter() - t_all
    if cuda:
        steps = [x.elapsed_time(y) / 1e3 for x, y in evs]
    tok = batch * T
    tps = [tok / s for s in steps]
    mem = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0
    med = rec(f"train {a.model} {a.exec} {a.precision} attn={a.attn} B={batch} T={T}", "tok/s", tps, params=N, n_mm=n_mm,
              step_ms=round(1e3 * sorted(steps)[len(steps) // 2], 2), wall_tok_s=round(tok * a.steps / t_all), mem_gib=round(mem, 1),
              first_step_s=round(t_first, 1), loss_first=round(first.item(), 3), loss_last=round(last.item(), 3), lnV=round(math.log(c["V"]), 3))
    print(f"    TFLOP/s full {med * full / 1e12:.1f} causal {med * causal / 1e12:.1f};  MFU full {100 * med * full / 1e12 / a.peak:.1f}% causal "
          f"{100 * med * causal / 1e12 / a.peak:.1f}% of {a.peak};  FLOP/token full {full / 1e9:.4f}e9 causal {causal / 1e9:.4f}e9", flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="gpt2-124m", choices=CFG)
    p.add_argument("--exec", default="eager", choices=["eager", "compile"])
    p.add_argument("--precision", default="autocast", choices=["autocast", "master"])
    p.add_argument("--attn", default="flash", choices=["flash", "cudnn", "auto"])
    p.add_argument("--batch", default="32", help="comma list: the first that fits is used")
    p.add_argument("--seq", type=int, default=0)
    p.add_argument("--warmup", type=int, default=5)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--device", default="cuda")
    p.add_argument("--peak", type=float, default=989.5)
    a = p.parse_args()
    print(versions(), flush=True)
    for b in [int(x) for x in a.batch.split(",")]:
        try:
            run(a, b)
            return
        except torch.OutOfMemoryError:
            print(f"batch {b}: out of memory", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
