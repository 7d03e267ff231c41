"""gpu.py's prompts and scripts, without a GPU. test_benchmarks.py tests its tables, and runs it at
toy size."""

import gpu
from transformers import AutoTokenizer

from grpo_llm import encode_prompts


def test_prompts_are_padded_as_in_a_real_run():
    """With prompts of one length another attention would be measured."""
    tokenizer = AutoTokenizer.from_pretrained(gpu.TINY_MODEL)
    lengths = list(map(len, encode_prompts(gpu.problems_of(8), tokenizer)))
    assert lengths[0] == max(lengths) == gpu.LONGEST and len({*lengths}) > 4


def test_every_change_is_a_script_that_loads():
    """The blocks of VARIANTS.md fit each other in this order."""
    for _, flags, blocks in gpu.CHANGES:
        assert gpu.script_with(*blocks).Args(**flags)
