"""VARIANTS.md: each block gives the numbers that its source's own code gives (run once, outside the
repository, on the completions below), or that its definition gives. And variants.py, which applies
them, refuses what it must."""

import functools
import itertools
import re
import shutil
from pathlib import Path
from unittest.mock import MagicMock

import bench
import pytest
import torch
import variants
from conftest import batch_of, random_model, refused
from oracles import row_by_row, single_rows
from test_llm_update import LENGTHS, PROMPTS
from torch.nn.utils.rnn import pad_sequence

ROOT = variants.ROOT
ROWS = re.findall(r"^\| \[(\w+)\]\(#\S+\) \| .+? \| (.+) \|$", variants.PAGE, re.M)
FITS = [(name, f"{other}_llm") for name, others in ROWS for other in re.findall(r"\w+", others)]
FITS += [(name, "grpo_llm") for name in variants.BLOCKS]


@functools.cache
def variant(*names):
    """The module of grpo_llm.py with these blocks."""
    return bench.module_of("_".join(["variant", *names]), variants.applied(*names))


# ------------------------------------------------------------------------ The push on each token

# Four completions, a row each: log π_old, and the differences of log π_θ, log π_s and log π_ref.
COUNTS = [3, 2, 3, 1]
ADVANTAGES = torch.tensor([1.5, 0.5, -1.0, -2.0]).double()
OLD, LOG_R, LOG_W, D = torch.tensor(
    [
        [[-0.7, -1.2, -2.3], [-0.4, -1.6, 0], [-0.9, -0.3, -1.8], [-1.5, 0, 0]],
        [[0.3, -0.3, 0.05], [0.1, 0.5, 0], [-0.3, 0.2, 1.3], [1.2, 0, 0]],
        [[0.5, -0.8, 0], [0.8, 0.2, 0], [-0.4, 0.1, -1.0], [1.8, 0, 0]],
        [[0.4, -0.5, 0.1], [0, 0.6, 0], [-0.2, 0.3, -0.7], [0.25, 0, 0]],
    ]
).double()

# Each source and its flags. TRL is 1.16.0 and its GRPOTrainer, verl 1dda039 and its
# core_algos, prime-rl 559b447, OpenRLHF 3c3be62.
SOURCES = {
    # TRL, loss_type sapo; verl, compute_policy_loss_sapo
    "sapo": {"beta": 0},
    # prime-rl, default_loss_fn with kl_tau 0, and OLD as the sampler's
    "dppo": {"beta": 0, "clip_low": 0.1, "clip_high": 0.15},
    # TRL, token_truncate; with β 0 OpenRLHF's tis, too
    "tis": {"beta": 0.3, "max_weight": 2.0},
    # verl, the vanilla loss without bounds, and minus its k1 as the advantage
    "opd": {"beta": 0, "clip_low": 1.0, "clip_high": 9.0, "teacher": ""},
}
# The slope of each token's objective by its log π.
SLOPES = """
sapo        1.964071 1.092773 1.575871 0.55106 0.743369 -0.727269 -1.205048 -0.79119 -1.965127
dppo        0 1.111227 1.576907 0.552585 0.824361 0 -1.221403 -3.669297 -6.640234
tis         0.147547 0.381266 1.608458 1.105171 0.246636 -0.054381 -1.244901 -1.500883 -13.19526
opd         0.944901 -0.592655 0.157691 0.110517 1.813593 -0.370409 0.610701 2.201578 4.814169
"""


@pytest.mark.parametrize("row", SLOPES.strip().splitlines())
def test_a_token_is_pushed_as_in_the_source(row, monkeypatch):
    name, *expected = row.split()
    module, model = variant(name), torch.nn.Module()
    model.logprobs = torch.nn.Parameter(OLD + LOG_R)
    args = module.Args(micro_batch_size=3, max_grad_norm=1e9, **SOURCES[name])
    mask = (torch.arange(3) < torch.tensor(COUNTS)[:, None]).double()
    batch = {"mask": mask, "row": torch.arange(4), "old_logprobs": OLD}
    batch |= {"sampled_logprobs": OLD - LOG_W, "ref_logprobs": OLD + LOG_R + D}
    # slime's apply_opd_kl_to_advantages gives each token this credit, with the teacher as π_ref
    batch["advantages"] = LOG_R + D if name == "opd" else ADVANTAGES
    monkeypatch.setattr(module, "token_logprobs", lambda m, part, _: m.logprobs[part["row"]])
    module.train_minibatch(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, args)
    shares = 1 / (4 * mask.sum(1, keepdim=True))
    slopes = -(model.logprobs.grad / shares)[mask > 0]
    expected = torch.tensor([float(slope) for slope in expected]).double()
    torch.testing.assert_close(slopes, expected, rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------------- Credit


def run_main(module, patch, model, rollout=None, **flags):
    """Run main with this model and this function in place of rollout; nothing is evaluated."""
    patch.setattr(module, "load_task", lambda _: (None, [("", "")] * 99, []))
    patch.setattr(module, "load_model", lambda _: (model, MagicMock()))
    patch.setattr(module, "evaluate", lambda *_: {"eval/pass@1": 0.0})
    patch.setattr(module, "rollout", rollout)
    patch.setattr(torch, "randperm", torch.arange)
    module.main(module.Args(**{"beta": 0.0, "num_minibatches": 1} | flags))


# Block, flags, rewards, lengths, and the advantages that the source gives them.
REWARDS = [[1, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 1]]
TOKENS = [[2, 6, 3, 7], [5, 4, 8, 2], [3, 3, 2, 4]]
WHITE = [1.860498, -1.056763, 1.860498, -1.056763, *[-0.327448] * 3, 2.589813, *[0.401868] * 4]
CREDIT = [
    # OpenRLHF 3c3be62, experience_maker.py, reinforce_baseline
    ("reinforce_pp", {}, REWARDS, TOKENS, WHITE),
]


def minibatch(name, patch, folder, rewards, lengths, old=None, **flags):
    """What main gives to train_minibatch after such a rollout, where each model but the sampler
    says that log π is twice what `old` says."""
    module, given = variant(name), []

    def train_minibatch(model, optimizer, batch, args):
        given.append(batch)
        return {"approx_kl": torch.zeros(())}

    mask = (torch.arange(8) < torch.tensor(lengths).view(-1, 1)).double()
    batch = {"mask": mask, "ended": mask[:, 0] > 0, "old_logprobs": -mask if old is None else old}
    drawn = batch, torch.tensor(rewards).double(), None
    patch.setattr(module, "token_logprobs", lambda model, part, _: 2 * part["old_logprobs"])
    patch.setattr(module, "train_minibatch", train_minibatch)
    flags |= {"steps": 1, "output_dir": str(folder), "group_size": len(rewards[0])}
    run_main(module, patch, random_model("gpt2"), lambda *_: drawn, **flags)
    return given[0]


@pytest.mark.parametrize("name,flags,rewards,lengths,expected", CREDIT)
def test_credit_is_the_sources(name, flags, rewards, lengths, expected, monkeypatch, tmp_path):
    batch = minibatch(name, monkeypatch, tmp_path, rewards, lengths, **flags)
    expected = torch.tensor(expected).double()
    torch.testing.assert_close(batch["advantages"], expected, rtol=1e-3, atol=1e-5)


OLD_8 = -torch.rand(12, 8, generator=torch.Generator().manual_seed(0)).double()
OLD_8 *= torch.arange(8) < torch.tensor(TOKENS).view(-1, 1)


def test_opd_credits_what_the_teacher_finds_more_likely_than_pi_old(monkeypatch, tmp_path):
    teacher = str(ROOT / "tests/tiny_model")
    batch = minibatch("opd", monkeypatch, tmp_path, REWARDS, TOKENS, OLD_8, teacher=teacher)
    torch.testing.assert_close(batch["advantages"], 2 * OLD_8 - OLD_8)


def test_tis_computes_pi_old_and_keeps_the_samplers(monkeypatch, tmp_path):
    batch = minibatch("tis", monkeypatch, tmp_path, REWARDS, TOKENS, OLD_8)
    torch.testing.assert_close(batch["sampled_logprobs"], OLD_8)
    torch.testing.assert_close(batch["old_logprobs"], 2 * OLD_8)


# -------------------------------------------------------------------------------------- A critic


def test_ppos_advantages_and_targets_are_gaes(monkeypatch, tmp_path):
    """By its definition: R_i follows the last token, and what stands in the padding has no say."""
    old = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).double()
    batch = minibatch("ppo", monkeypatch, tmp_path, REWARDS, TOKENS, old, gae_lambda=0.8)
    lengths, rewards = sum(TOKENS, []), sum(REWARDS, [])
    for i, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        values = [*(2 * old[i, :length]).tolist(), reward]
        deltas = [after - before for before, after in itertools.pairwise(values)]
        for t, advantage in enumerate(batch["advantages"][i, :length].tolist()):
            expected = sum(0.8**n * delta for n, delta in enumerate(deltas[t:]))
            assert advantage == pytest.approx(expected)
            assert batch["targets"][i, t].item() == pytest.approx(values[t] + expected)
        assert not batch["advantages"][i, length:].any()


def test_ppos_step_has_the_gradient_of_both_losses(monkeypatch, tmp_path):
    """Through plain passes. The critic is a copy that says 0 at first and shares no weight with the
    policy, whose embeddings are here its head."""
    module, model = variant("ppo"), random_model("gpt2")
    policy = {p.data_ptr() for p in model.parameters()}
    run_main(module, monkeypatch, model, steps=0, output_dir=str(tmp_path))
    assert not policy & {p.data_ptr() for p in model.critic.parameters()}
    batch, args = batch_of(model, PROMPTS, LENGTHS), module.Args(micro_batch_size=5, beta=0)
    assert not module.token_logprobs(model.critic, batch, args).any()
    torch.nn.init.normal_(model.critic.get_output_embeddings().weight)
    model.double()
    mask, args.max_grad_norm = batch["mask"], 1e9
    drift, advantages, targets = torch.randn(3, *mask.shape) * mask
    batch |= {"advantages": advantages, "targets": targets}
    batch["old_logprobs"] = batch["old_logprobs"] + drift / 2
    module.train_minibatch(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, args)
    ratio = (row_by_row(model, batch) - batch["old_logprobs"]).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    values = [logits[:, 0] for _, logits in single_rows(model.critic, batch)]
    errors = (pad_sequence(values, batch_first=True) - targets) * mask
    loss = (0.5 * errors.square() - objective * mask) / (12 * mask.sum(1, keepdim=True))
    expected = torch.autograd.grad(loss.sum(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------ Samplers and memory


def test_stale_rollouts_are_drawn_by_the_model_of_two_steps_ago(monkeypatch, tmp_path):
    """And the run goes on, however far the ratios are from 1 at once."""
    module, model, drawn_by = variant("stale"), random_model("llama"), []
    weight = model.lm_head.weight.data.zero_()

    def rollout(sampler, *_):
        drawn_by.append(sampler.lm_head.weight[0, 0].item())
        return batch_of(model, PROMPTS, LENGTHS), torch.zeros(3, 4), None

    def train_minibatch(*_):
        weight.add_(1)  # so it counts the steps
        return {"approx_kl": torch.ones(())}

    monkeypatch.setattr(module, "train_minibatch", train_minibatch)
    flags = {"stale": 2, "steps": 5, "group_size": 4, "output_dir": str(tmp_path)}
    run_main(module, monkeypatch, model, rollout, **flags)
    assert drawn_by == [0, 0, 0, 1, 2]


def test_checkpointing_reads_each_layer_twice_and_changes_no_gradient(monkeypatch, tmp_path):
    """Dropout stays off, and the sampler's cache works as before. The passes are those of a model
    that main has prepared."""
    module, calls, gradients = variant("checkpointing"), [], []
    model = random_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5)
    model.transformer.h[0].attn.register_forward_hook(lambda *_: calls.append("a pass"))
    batch, args = batch_of(model, PROMPTS, LENGTHS), module.Args(beta=0, max_new_tokens=8)
    batch["advantages"] = torch.tensor([1.0, -1.0] * 6)
    for passes in (1, 2):
        calls.clear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        module.train_minibatch(model, optimizer, batch, args)
        assert len(calls) == passes
        gradients.append([p.grad.clone() for p in model.parameters()])
        run_main(module, monkeypatch, model, steps=0, output_dir=str(tmp_path))
    torch.testing.assert_close(*gradients)
    assert module.generate(model, PROMPTS, 4, args)["mask"].sum() > 12


# ------------------------------------------------------------------------ The page and variants.py


@pytest.mark.parametrize("name,parent", FITS)
def test_a_block_fits_and_leaves_no_flag_that_nothing_reads(name, parent):
    text = variants.applied(name, script=parent)
    compile(text, parent, "exec")
    _, flags = text.split("\nclass Args:\n")
    for flag in re.findall(r"^    (\w+): ", flags.split("\n\n")[0], re.M):
        assert re.search(rf"\b(args|self)\.{flag}\b", text), flag


@pytest.mark.slow
@pytest.mark.parametrize("name", variants.BLOCKS)
def test_two_steps(name, short_run):
    """And the checkpoint is the policy alone."""
    module, more = variant(name), {"teacher": str(ROOT / "tests/tiny_model")}
    folder = module.main(module.Args(**short_run, **more if name == "opd" else {}))["folder"]
    assert b"critic" not in Path(folder, "step-000002/model.safetensors").read_bytes()


def test_blocks_are_applied_in_order_and_an_edited_file_is_kept(tmp_path, monkeypatch):
    """And what does not fit is refused in a line, with nothing written."""
    for name in ("grpo_llm.py", "rloo_llm.py"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.setattr(variants, "ROOT", tmp_path)
    twice = "@@ train_step\n-    if RANK == 0:\n+    if RANK == 0:  # mine\n"
    monkeypatch.setitem(variants.BLOCKS, "twice", twice)  # these lines are there more than once
    for names, line in [
        ("stale tis stale", "stale is in grpo_llm.py with stale with tis already"),
        ("rloo_llm dppo", "dppo does not fit rloo_llm.py: it looks for `clip_low: float = 0.2"),
        ("twice", "twice does not fit grpo_llm.py"),
    ]:
        assert refused(variants.main, names.split()).startswith(line)
    assert not [*tmp_path.glob("variant_*")]
    variants.main(["stale"])
    variants.main(["variant_stale.py", "tis"])
    path = tmp_path / "variant_stale_tis.py"
    assert path.read_text() == variants.applied("stale", "tis") != variants.applied("tis", "stale")
    path.write_text("mine")
    assert refused(variants.main, ["stale", "tis"]).startswith("variant_stale_tis.py has other")
    assert path.read_text() == "mine"


def test_the_table_has_a_row_for_each_block():
    assert [name for name, _ in ROWS] == [*variants.BLOCKS]
