"""Checks the attention kernels against float64 and times them against PyTorch's flash and cuDNN attention, in one run.

    python3 benches/attention_h200.py [--check-only] [--time-only]

Needs a Hopper GPU, PyTorch, and libnvrtc.so.13 on the library path. Every check draws new inputs, poisons the outputs with
NaN, compares relative norms, and runs twice for equal bits. Times are medians of CUDA events, rates count 4·d operations
a visible score forward and 10·d backward whatever a kernel recomputes.
"""

import argparse
import ctypes
import math
import pathlib
import statistics
import subprocess

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = pathlib.Path(__file__).parent.parent / "train/src/backend/cuda/kernels"
# bf16 has 8 bits: one rounding of inputs, weights and outputs each is 2⁻⁹ in the worst case, half of it in norm.
BOUND = 1e-2
BOUND_LSE = 1e-5

cuda = ctypes.CDLL("libcuda.so.1")
nvrtc = ctypes.CDLL("libnvrtc.so.13")


def check(code):
    assert code == 0, f"CUDA answered {code}"


def compile_kernels(head_dim, dropout):
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = ["--gpu-architecture=sm_90a", f"-DHEAD_DIM={head_dim}", "-DKERNEL(name)=name"] + ["-DDROPOUT"] * dropout
    source = b"\n".join((KERNELS / name).read_bytes() for name in ("prelude.cuh", "attention.cu"))
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"attention.cu", 0, None, None))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
    check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetProgramLog(program, log))
    assert not failed, log.value.decode()
    check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    cubin = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    module = ctypes.c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(module), cubin))
    return module


class Drop(ctypes.Structure):
    _fields_ = [
        ("seed", ctypes.c_uint32),
        ("purpose", ctypes.c_uint32),
        ("place", ctypes.c_uint32),
        ("threshold", ctypes.c_uint32),
        ("scale", ctypes.c_float),
    ]


class Kernels:
    """The launches that the head of attention.cu describes."""

    def __init__(self, head_dim, dropout):
        self.d = head_dim
        module = compile_kernels(head_dim, dropout)
        half = 64 * head_dim * 2
        wide = 3 if head_dim == 64 else 2
        self.warpgroups = {"forward": wide, "dq": 3, "dkv": wide}
        shared = {
            "forward": (3 + 16 if head_dim == 64 else 2 + 8) * half + 256,
            "stats": 0,
            "dq": (2 * 3 + 3 * 2) * half + 256,
            "dkv": (2 * wide + 3 * 2) * half + 3 * 1024 + 256,
        }
        self.functions = {}
        for name, bytes_ in shared.items():
            function = ctypes.c_void_p()
            check(cuda.cuModuleGetFunction(ctypes.byref(function), module, f"attention_{name}".encode()))
            check(cuda.cuFuncSetAttribute(function, 8, bytes_))
            self.functions[name] = (function, bytes_)

    def compute(self, name, heads, batch, rows, args):
        """A launch of as many blocks as stay, of at most one a share of the work."""
        shares = heads * batch * -(-rows // (64 * self.warpgroups[name]))
        blocks = min(shares, torch.cuda.get_device_properties(0).multi_processor_count)
        self.launch(name, (blocks, 1, 1), 128 * (1 + self.warpgroups[name]), args)

    def launch(self, name, grid, block, args):
        function, shared = self.functions[name]
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in args]
        values = [ctypes.c_int(v) if isinstance(v, int) else ctypes.c_float(v) if isinstance(v, float) else v for v in values]
        params = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        check(cuda.cuLaunchKernel(function, *grid, block, 1, 1, shared, stream, params, None))


def tensor_map(x):
    """Of x [B, rows, columns] in bf16."""
    batch, rows, columns = x.shape
    memory = ctypes.create_string_buffer(192)
    encoded = (ctypes.c_uint64 * 16).from_buffer(memory, -ctypes.addressof(memory) % 64)
    dims = (ctypes.c_uint64 * 3)(columns, rows, batch)
    strides = (ctypes.c_uint64 * 2)(columns * 2, rows * columns * 2)
    box, steps = (ctypes.c_uint32 * 3)(64, 64, 1), (ctypes.c_uint32 * 3)(1, 1, 1)
    bf16, swizzle_128, promote_256 = 9, 3, 3
    check(
        cuda.cuTensorMapEncodeTiled(
            ctypes.byref(encoded), bf16, 3, ctypes.c_void_p(x.data_ptr()), dims, strides, box, steps,
            0, swizzle_128, promote_256, 0,
        )
    )  # fmt: skip
    return encoded


class Call:
    """One attention with random inputs: B samples of T keys; the local queries are rank `rank`'s of `cp`, zigzag."""

    def __init__(self, batch, keys, groups, queries, d, cp=1, rank=0, p=0.0, add=True):
        self.batch, self.keys, self.groups, self.queries, self.d, self.p = batch, keys, groups, queries, d, p
        self.heads, self.scale, self.add = groups * queries, 1 / math.sqrt(d), add
        chunk = keys // (2 * cp)
        local = torch.arange(keys) if cp == 1 else torch.cat(
            [torch.arange(c * chunk, (c + 1) * chunk) for c in (rank, 2 * cp - 1 - rank)])
        self.rows = len(local)
        self.local = local.cuda()
        self.positions = local.int().repeat(batch).cuda()
        self.ordinals = (torch.arange(batch) + (3 << 32) + 7).repeat_interleave(self.rows).cuda()
        seed, purpose, layer, self.first_head = 9, 3, 5, 2
        self.drop = Drop(seed, purpose, layer << 22, int(p * 2**32), 1 / (1 - p))
        new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.float32).bfloat16()
        self.qkv = new(batch, self.rows, groups * (queries + 2) * d)
        self.kv = new(batch, keys, groups * 2 * d)
        self.d_out = new(batch, self.rows, self.heads * d)
        self.poison()
        self.maps = [tensor_map(x) for x in (self.qkv, self.kv, self.d_out)]

    def poison(self):
        nan = lambda *shape, dtype=torch.bfloat16: torch.full(shape, math.nan, device="cuda", dtype=dtype)
        self.out, self.d_qkv = nan(*self.d_out.shape), nan(*self.qkv.shape)
        self.lse = nan(self.batch, self.rows, self.heads, dtype=torch.float32)
        padded = -(-self.rows // 64) * 64
        self.stats = nan(self.batch, self.heads, padded, 2, dtype=torch.float32)
        # Where gradients are added, to something that they are told apart from.
        self.d_kv = torch.full(self.kv.shape, 2.0, device="cuda") if self.add else nan(*self.kv.shape)

    def forward(self, kernels):
        qkv, kv, _ = self.maps
        kernels.compute("forward", self.heads, self.batch, self.rows, [
            qkv, kv, self.positions, self.ordinals, self.out, self.lse, self.batch, self.rows, self.groups, self.queries,
            self.scale, self.first_head, self.drop])  # fmt: skip

    def statistics(self, kernels):
        grid = (-(-self.stats.shape[2] * self.heads // (2048 // self.d)), self.batch, 1)
        kernels.launch("stats", grid, 256, [self.out, self.d_out, self.lse, self.stats, self.rows, self.heads])

    def dq(self, kernels):
        kernels.compute("dq", self.heads, self.batch, self.rows, [
            *self.maps, self.positions, self.ordinals, self.stats, self.d_qkv, self.batch, self.rows, self.groups,
            self.queries, self.scale, self.first_head, self.drop])  # fmt: skip

    def dkv(self, kernels):
        kernels.compute("dkv", self.groups, self.batch, self.keys, [
            *self.maps, self.positions, self.ordinals, self.stats, self.d_kv, self.batch, self.rows, self.keys, self.groups,
            self.queries, self.scale, self.groups * 2 * self.d, 2 * self.d, int(self.add), self.first_head, self.drop])  # fmt: skip

    def backward(self, kernels):
        self.statistics(kernels)
        self.dq(kernels)
        self.dkv(kernels)

    def run(self, kernels):
        self.poison()
        self.forward(kernels)
        self.backward(kernels)
        torch.cuda.synchronize()
        d_qkv = self.d_qkv.view(self.batch, self.rows, self.groups, self.queries + 2, self.d)
        assert d_qkv[:, :, :, self.queries :].isnan().all(), "only the query columns are written"
        d_kv = (self.d_kv - 2 if self.add else self.d_kv).view(self.batch, self.keys, self.groups, 2, self.d)
        return {
            "out": self.out,
            "lse": self.lse,
            "dq": d_qkv[:, :, :, : self.queries].reshape(self.batch, self.rows, -1),
            "dk": d_kv[:, :, :, 0],
            "dv": d_kv[:, :, :, 1],
        }

    def kept(self):
        """The factor of each weight, [B, G·q, rows, keys]: Philox4x32-10 by coordinates, as in train/src/rng.rs."""
        u64 = lambda x: np.asarray(x, dtype=np.uint64)
        word = u64(0xFFFFFFFF)
        ordinal = u64(self.ordinals.view(self.batch, -1)[:, 0].cpu().numpy())[:, None, None, None]
        head = u64(np.arange(self.heads) + self.first_head)[None, :, None, None]
        counter = [
            u64(np.arange(-(-self.keys // 4)))[None, None, None, :],
            u64(self.local.cpu().numpy())[None, None, :, None],
            ordinal & word,
            u64(self.drop.place) | head << u64(14) | ordinal >> u64(32),
        ]
        counter = list(np.broadcast_arrays(*counter))
        k0, k1 = self.drop.seed, self.drop.purpose
        for _ in range(10):
            a, b = counter[0] * u64(0xD2511F53), counter[2] * u64(0xCD9E8D57)
            counter = [b >> u64(32) ^ counter[1] ^ u64(k0), b & word, a >> u64(32) ^ counter[3] ^ u64(k1), a & word]
            k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
        words = np.stack(counter, -1).reshape(*counter[0].shape[:3], -1)[..., : self.keys]
        return torch.from_numpy((words >= self.drop.threshold) * self.drop.scale).cuda()

    def reference(self):
        """In float64, by the formulas."""
        qkv = self.qkv.double().view(self.batch, self.rows, self.groups, self.queries + 2, self.d)
        q = qkv[:, :, :, : self.queries].reshape(self.batch, self.rows, self.heads, self.d).transpose(1, 2)
        kv = self.kv.double().view(self.batch, self.keys, self.groups, 2, self.d)
        k, v = (kv[:, :, :, i].transpose(1, 2) for i in (0, 1))
        each = lambda x: x.repeat_interleave(self.queries, 1)
        d_out = self.d_out.double().view(self.batch, self.rows, self.heads, self.d).transpose(1, 2)
        scores = q @ each(k).transpose(2, 3) * self.scale
        hidden = torch.arange(self.keys, device="cuda")[None, :] > self.local[:, None]
        scores.masked_fill_(hidden, -math.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        kept = self.kept() if self.p > 0 else 1.0
        out = weights * kept @ each(v)
        d_weights = d_out @ each(v).transpose(2, 3) * kept
        d_scores = weights * (d_weights - (d_out * out).sum(-1, keepdim=True)) * self.scale
        group = lambda x: x.view(self.batch, self.groups, self.queries, self.keys, self.d).sum(2).transpose(1, 2)
        rows = lambda x: x.transpose(1, 2).reshape(self.batch, self.rows, -1)
        return {
            "out": rows(out),
            "lse": lse.transpose(1, 2),
            "dq": rows(d_scores @ each(k)),
            "dk": group(d_scores.transpose(2, 3) @ q),
            "dv": group((weights * kept).transpose(2, 3) @ d_out),
        }


def check_all(kernels_for):
    cases = [
        dict(batch=1, keys=128, groups=1, queries=1, d=128),
        dict(batch=2, keys=512, groups=2, queries=4, d=128),
        dict(batch=2, keys=512, groups=2, queries=3, d=64),
        dict(batch=3, keys=200, groups=2, queries=2, d=128),
        dict(batch=9, keys=1000, groups=2, queries=8, d=64),
        dict(batch=9, keys=1000, groups=2, queries=8, d=128),
        dict(batch=2, keys=33, groups=1, queries=2, d=64),
        dict(batch=2, keys=384, groups=1, queries=2, d=128, cp=2, rank=0),
        dict(batch=2, keys=384, groups=1, queries=2, d=128, cp=2, rank=1),
        dict(batch=1, keys=1536, groups=2, queries=1, d=64, cp=3, rank=1),
        dict(batch=1, keys=2048, groups=2, queries=8, d=128, add=False),
        dict(batch=2, keys=384, groups=2, queries=2, d=128, p=0.25),
        dict(batch=2, keys=384, groups=2, queries=2, d=64, cp=2, rank=1, p=0.1),
    ]
    failures = 0
    for case in cases:
        call = Call(**case)
        kernels = kernels_for(case["d"], call.p > 0)
        found, wanted, again = call.run(kernels), call.reference(), call.run(kernels)
        line = []
        for name, reference in wanted.items():
            error = ((found[name].double() - reference).norm() / reference.norm()).item()
            good = error < (BOUND_LSE if name == "lse" else BOUND) and torch.equal(found[name], again[name])
            failures += not good
            line.append(f"{name} {error:.1e}{'' if good else ' WRONG'}")
        print(case, "|", *line, flush=True)
    assert failures == 0, f"{failures} results are wrong"


def milliseconds(run, repeats=20):
    for _ in range(3):
        run()
    events = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def time_all(kernels_for):
    cases = [
        dict(batch=64, keys=1024, groups=12, queries=1, d=64),
        dict(batch=8, keys=4096, groups=4, queries=8, d=64),
        dict(batch=8, keys=4096, groups=4, queries=8, d=128),
        dict(batch=2, keys=16384, groups=4, queries=8, d=128),
    ]
    print("milliseconds (TFLOP/s)")
    for case in cases:
        call = Call(**case, add=False)
        kernels = kernels_for(case["d"], False)
        operations = 2 * call.batch * call.heads * call.keys * (call.keys + 1) * call.d
        show = lambda name, ms, factor: print(f"  {name:22} {ms:7.3f} ({factor * operations / ms / 1e9:5.0f})", flush=True)
        print(case, flush=True)
        forward = milliseconds(lambda: call.forward(kernels))
        parts = [milliseconds(lambda: part(kernels)) for part in (call.statistics, call.dq, call.dkv)]
        backward = milliseconds(lambda: call.backward(kernels))
        show("forward", forward, 1)
        show("backward", backward, 2.5)
        print(f"    stats {parts[0]:.3f}, dq {parts[1]:.3f}, dkv {parts[2]:.3f}")
        new = lambda heads: torch.randn(
            call.batch, call.keys, heads, call.d, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        q, k, v = new(call.heads), new(call.groups), new(call.groups)
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
            attend = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            with sdpa_kernel(backend):
                show(f"PyTorch {name} forward", milliseconds(attend), 1)
                out = attend()
                grad = torch.randn_like(out)
                backward = lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
                show(f"PyTorch {name} backward", milliseconds(backward), 2.5)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--time-only", action="store_true")
    arguments = parser.parse_args()
    torch.zeros(1, device="cuda")
    driver = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                            capture_output=True, text=True).stdout.strip()
    print(f"{driver}; torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    compiled = {}

    def kernels_for(head_dim, dropout):
        key = (head_dim, dropout)
        if key not in compiled:
            compiled[key] = Kernels(*key)
        return compiled[key]

    if not arguments.time_only:
        check_all(kernels_for)
    if not arguments.check_only:
        time_all(kernels_for)


if __name__ == "__main__":
    main()
