"""gpu.py without a GPU: its prompts, scripts and tables. test_benchmarks.py runs it at toy size."""

import gpu


def test_prompts_are_padded_as_in_a_real_run_and_trl_reads_the_same():
    """With prompts of one length another attention would be measured."""
    prompts = gpu.prompts_of(8)
    lengths = [len(prompt) for prompt in prompts]
    assert lengths[0] == max(lengths) == gpu.LONGEST and len({*lengths}) > 4
    tokenizer = gpu.words()
    assert tokenizer(gpu.texts_of(8))["input_ids"] == prompts
    assert tokenizer.eos_token_id == 5


def test_tables_have_ours_and_trls_steps_in_one():
    common = {"machine": "a card", "revision": "abc"}
    lines = [
        {"part": "step", "name": "ours", "s": 13.47, "rollout_s": 6.0, "batch_logprobs_s": 2.5},
        {"part": "trl", "name": "TRL", "s": 20.0, "ms_per_token": 40.04},
        {"part": "decode", "name": "256 rows", "ms_per_token": 23.5, "gap_mean": 1e-6},
        {"part": "train", "name": "4 rows", "error": "OutOfMemoryError()", "ok": False},
    ]
    tables = gpu.tables([line | common for line in lines])
    assert tables["gpu_step"][2:] == [
        "| ours | 13.5 | 6 | – | 2.5 | – | – | – |",
        "| TRL | 20 | – | 40 | – | – | – | – |",
        "",
        "a card; revision abc",
    ]
    assert tables["gpu_decode"][2] == "| 256 rows | 23.5 |"
    assert tables["gpu_train"][2] == "| 4 rows | – | – | – |"


def test_every_change_is_a_script_that_loads():
    """The blocks of VARIANTS.md fit each other in this order."""
    for _, flags, blocks in gpu.CHANGES:
        script = gpu.script_with(*blocks)
        assert script.Args(**flags)
