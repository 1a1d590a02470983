# SPDX-License-Identifier: Apache-2.0
"""Answers of transformers' eager attention, and the settings that sglang needs in a test."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import psutil
import tokenizers
import torch
import transformers

from support.vllm.vllm_models import VOCABULARY

# Settings that a new process may make before it imports sglang.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # oneDNN uses AMX if the machine shows it, and dies if its tiles are off.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
    # sglang lets torch compile a function of Gemma 3, which takes longer than all the rest.
    "TORCHDYNAMO_DISABLE": "1",
}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with words w0, w1, ... for the tokens of a model of `vllm_models`."""
    words = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def eager_answers(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return the tokens with which a model continues each prompt, in float32."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    greedy = {"max_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
        answers.append(tokens[0, len(prompt) :].tolist())
    return answers


def leave_nothing(pid: int) -> None:
    """Remove the shared memory that an engine process and its children have mapped: at its end it
    kills all processes, also Python's, which would otherwise remove the memory."""
    process = psutil.Process(pid)
    unlink(mapped_by([process, *process.children(recursive=True)]))


def mapped_by(processes: Iterable[psutil.Process]) -> set[int]:
    """Return inodes of shared memory that processes have mapped; ended ones have none."""
    mapped = set()
    for each in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each.pid}/maps").read_text().splitlines():
                _, _, _, _, inode, *name = line.split()
                if name and name[0].startswith("/dev/shm/"):  # semaphores show an earlier name
                    mapped.add(int(inode))
    return mapped


def shared_memory() -> set[int]:
    """Return the inodes of all shared memory."""
    return {path.stat().st_ino for path in Path("/dev/shm").iterdir()}


def unlink(inodes: set[int]) -> None:
    for path in Path("/dev/shm").iterdir():
        if path.stat().st_ino in inodes:
            path.unlink()
