#!/usr/bin/env bash
# Training steps on one GPU, ours and PyTorch's in one call: GPT-2 124M at 64 x 1,024 and a Llama-like model of 1.1 B at 8 x 4,096,
# bf16 with f32 masters, random tokens. Needs python3 with torch and numpy, and
#
#     cargo build --locked --profile measure --bin remesh
#     benches/train_h200/run.sh target/measure/remesh
#
# Ours prints tokens/s of each step, clipping, AdamW and reading the batch included; PyTorch (compiled, cuDNN attention, fused
# AdamW, clipping) the median of its steps.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
remesh=$(realpath "$1")
cd "$(mktemp -d)"
"$remesh" doctor
python3 "$here/tokens.py" gpt 50257 3000000
python3 "$here/tokens.py" llama 32000 3000000
common=(--device cuda --numerics fast --bf16 --lr 1e-4 --log-interval 1)

printf '\nGPT-2 124M\n'
"$remesh" train "${common[@]}" --num-layers 12 --hidden-size 768 --ffn-hidden-size 3072 --num-attention-heads 12 \
    --seq-length 1024 --vocab-size 50257 --normalization LayerNorm --position-embedding-type learned_absolute --no-swiglu \
    --add-bias-linear --tie-embeddings --micro-batch-size 64 --global-batch-size 64 --train-iters 16 --data-path gpt
python3 "$here/torch_decoder.py" --model gpt2-124m --exec compile --precision master --attn cudnn --batch 64 --steps 12

printf '\nLlama-like 1.1 B\n'
"$remesh" train "${common[@]}" --num-layers 22 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 32 \
    --num-query-groups 4 --seq-length 4096 --vocab-size 32000 --micro-batch-size 8 --global-batch-size 8 --train-iters 9 \
    --data-path llama
python3 "$here/torch_decoder.py" --model llama-1.1b --exec compile --precision master --attn cudnn --batch 8 --steps 8
