"""gpu.py's prompts and scripts, without a GPU. test_benchmarks.py tests its tables, and runs it at
toy size."""

import gpu


def test_prompts_are_padded_as_in_a_real_run_and_trl_reads_the_same():
    """With prompts of one length another attention would be measured."""
    prompts = gpu.prompts_of(8)
    lengths = [len(prompt) for prompt in prompts]
    assert lengths[0] == max(lengths) == gpu.LONGEST and len({*lengths}) > 4
    tokenizer = gpu.words()
    assert tokenizer(gpu.texts_of(8))["input_ids"] == prompts
    assert tokenizer.eos_token_id == 5


def test_every_change_is_a_script_that_loads():
    """The blocks of VARIANTS.md fit each other in this order."""
    for _, flags, blocks in gpu.CHANGES:
        assert gpu.script_with(*blocks).Args(**flags)
