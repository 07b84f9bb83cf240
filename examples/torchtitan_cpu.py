"""Runs torchtitan's training program on CPUs, where it expects GPUs, with ncclx_rs as its default backend.

    pip install torchtitan
    NCCLX_RS_DEFAULT=cpu,cuda torchrun --nproc-per-node 2 examples/torchtitan_cpu.py

The program is torchtitan's own, `torchtitan.train`, unchanged. This module replaces the GPU: the name and memory of the
device, and attention, whose kernel has no backward pass on CPUs. It also makes a text and a tokenizer, which the
package does not contain. Without arguments it trains `llama3_debugmodel` on short sequences;
docs/programs.md has other command lines.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention

ARGUMENTS = (
    "--module llama3 --config llama3_debugmodel --training.steps 10 --training.local_batch_size 2 "
    "--training.seq_len 128 --training.disable_cuda_graphs --validator.no-enable --debug.seed 1"
).split()


def have_device() -> None:
    """Makes the CPU torchtitan's device: replaces what it uses of ``torch.cuda``. Called before its import."""
    cpu: Any = torch.cpu
    memory = SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    cpu.get_device_name = lambda device=None: "CPU"
    cpu.get_device_properties = lambda device=None: memory
    cpu.current_device = lambda: 0
    cpu.memory_stats = lambda device=None: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    utils: Any = torch._utils
    utils._get_available_device_type = lambda: "cpu"


def dense_attention(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **rest: Any) -> Any:
    """flex_attention for a mask, with a backward pass on CPUs; tensors are (batch, heads, length, width)."""
    mask = create_mask(block_mask.mask_mod, q.size(0), q.size(1), q.size(2), k.size(2), device=q.device.type)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None


def make_assets(folder: Path) -> None:
    """A tokenizer of single bytes, and text: the source of Python's standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    (folder / "tests/assets/tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tests/assets/tokenizer/tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tests/assets/tokenizer/tokenizer_config.json").write_text(json.dumps(special))
    (folder / "tests/assets/c4_test").mkdir()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    lines = [json.dumps({"text": source.read_text(errors="replace")[:20_000]}) for source in sources]
    (folder / "tests/assets/c4_test/data.json").write_text("\n".join(lines))


def main() -> None:
    # Compilers take longer than such a short training.
    torch.compiler.set_stance("force_eager")
    have_device()
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.train import main as train

    attention: Any = FlexAttention
    attention._compiled_flex_attn = staticmethod(dense_attention)
    given = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        make_assets(Path(scratch))
        os.environ.setdefault("HF_HOME", scratch)
        os.chdir(scratch)
        sys.argv[1:] = [*ARGUMENTS, *given]
        train()


if __name__ == "__main__":
    main()
