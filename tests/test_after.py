"""AFTER.md: each method gives the numbers that its source's own code gives (run once, outside the
repository, on the answers below). Blocks fit the scripts, alone and together, and what they write
runs. What fits and makes no sense is refused."""

import copy
import importlib.util
import itertools
import math
import re
import sys
from pathlib import Path

import after
import pytest
import torch
import tyro
from conftest import calls_of, random_model, refused, script
from oracles import single_rows
from scripts import LLM_SCRIPTS, ROOT
from test_llm_update import LENGTHS, PROMPTS, batch_of

FIVE = [name for name in LLM_SCRIPTS if name != "ppo_llm"]
ENGINEERING = ("bf16", "checkpointing")
ALONE = [([name], "grpo_llm") for name in after.BLOCKS]
TOGETHER = [([name], parent) for name in ENGINEERING for parent in FIVE if parent != "grpo_llm"]
TOGETHER += [(["stale", name], "grpo_llm") for name in ("tis", "icepop", "mis", "sequence_mask")]
TOGETHER += [(names.split(), "grpo_llm") for names in ("dppo icepop", "bf16 checkpointing")]
TOGETHER += [(names.split(), "grpo_llm") for names in ("token_mean mis unbiased_kl",)]
TOGETHER += [(["token_mean", "icepop", "sequence_mask", "unbiased_kl"], "grpo_llm")]
TOGETHER += [(["token_mean", name], "grpo_llm") for name in ("dual_clip", "dppo", "reinforce_pp")]
# By kind: credit and weight, credit and sampler, bonus and KL, and each with another parent.
KINDS = ("maxrl sapo", "pass_at_k gmpo", "opd dppo", "opd entropy tis", "entropy unbiased_kl")
TOGETHER += [(names.split(), "grpo_llm") for names in KINDS]
TOGETHER += [(["opd"], "cispo_llm"), (["mis", "entropy"], "gspo_llm")]
TOGETHER += [(["stale", "tis"], "rloo_llm"), (["dual_clip", "icepop"], "dapo_llm")]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Imports a script with these blocks, written into a folder of its own: a script of this name
    in the repository's root is not looked at."""
    folder = tmp_path_factory.mktemp("after")
    for path in [ROOT / "tests", *(ROOT / f"{name}.py" for name in FIVE)]:
        (folder / path.name).symlink_to(path)

    def module(names, parent="grpo_llm"):
        with pytest.MonkeyPatch.context() as patch:
            text = after.applied(*names, script=parent)
            patch.setattr(after, "ROOT", folder)
            path = after.write(*names, script=parent)
        assert path.read_text() == text
        spec = importlib.util.spec_from_file_location(path.stem, path)
        found = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found

    return module


# ------------------------------------------------------------------------------- A token's push

# Four answers, a row each: log π_old, and what log π_θ, log π_s and log π_ref differ from it by.
COUNTS = [3, 2, 3, 1]
ADVANTAGES = torch.tensor([1.5, 0.5, -1.0, -2.0])
OLD = torch.tensor([[-0.7, -1.2, -2.3], [-0.4, -1.6, 0], [-0.9, -0.3, -1.8], [-1.5, 0, 0]])
LOG_R = torch.tensor([[0.3, -0.3, 0.05], [0.1, 0.5, 0], [-0.3, 0.2, 1.3], [1.2, 0, 0]])
LOG_W = torch.tensor([[0.5, -0.8, 0], [0.8, 0.2, 0], [-0.4, 0.1, -1.0], [1.8, 0, 0]])
D = torch.tensor([[0.4, -0.5, 0.1], [0, 0.6, 0], [-0.2, 0.3, -0.7], [0.25, 0, 0]])
# Credit of each token in place of an answer's, as slime's apply_opd_kl_to_advantages gives it to
# OLD with OLD + LOG_R + D as the teacher's.
TEACHER_A = torch.tensor([[0.7, -0.8, 0.15], [0.1, 1.1, 0], [-0.5, 0.5, 0.6], [1.45, 0, 0]])

SOURCES = [
    # block, flags, and the slope of each token's objective by its log π. TRL is 1.16.0 and its
    # GRPOTrainer, verl 1dda039 and its core_algos, prime-rl 559b447, OpenRLHF 3c3be62.
    (  # TRL, loss_type sapo; verl, compute_policy_loss_sapo
        "sapo",
        {"beta": 0},
        [1.964071, 1.092773, 1.575871, 0.55106, 0.743369]
        + [-0.727269, -1.205048, -0.79119, -1.965127],
    ),
    (  # verl, compute_policy_loss_geo_mean
        "gmpo",
        {"beta": 0, "clip_low": 0.25, "clip_high": 0.25},
        [0, 1.5, 1.5, 0.595623, 0, 0, -1.516897, -1.516897, -6.640234],
    ),
    (  # prime-rl, default_loss_fn with kl_tau 0, and OLD as the sampler's
        "dppo",
        {"beta": 0, "clip_low": 0.1, "clip_high": 0.15},
        [0, 1.111227, 1.576907, 0.552585, 0.824361, 0, -1.221403, -3.669297, -6.640234],
    ),
    (
        "dppo",
        {"beta": 0, "clip_low": 0.17, "clip_high": 0.2},
        [2.024788, 1.111227, 1.576907, 0.552585, 0.824361]
        + [-0.740818, -1.221403, -3.669297, -6.640234],
    ),
    (  # TRL, delta; with β 0 verl's vanilla and OpenRLHF's dual_clip give its slopes
        "dual_clip",
        {"beta": 0.3, "delta": 3.0},
        [0.147547, 0.993187, 1.608458, 0.552585, 0.246636]
        + [-0.054381, -1.116445, -0.151024, 0.085208],
    ),
    (  # TRL, use_bias_correction_kl
        "unbiased_kl",
        {"beta": 0.3},
        [0.161983, 1.000105, 1.608445, 0.552585, 0.29677]
        + [-0.044449, -1.111477, -4.439849, -6.391225],
    ),
    (  # TRL, token_truncate; with β 0 OpenRLHF's tis, too
        "tis",
        {"beta": 0.3, "max_weight": 2.0},
        [0.147547, 0.381266, 1.608458, 1.105171, 0.246636]
        + [-0.054381, -1.244901, -1.500883, -13.19526],
    ),
    (  # TRL, token_mask from 0.5 to 5; with β 0 OpenRLHF's icepop, too
        "icepop",
        {"beta": 0.3},
        [0.147547, -0.118041, 1.608458, 1.229802, 0.246636]
        + [-0.054381, -1.244901, -0.151024, 0.085208],
    ),
    (  # TRL, sequence_mask with its default of 3
        "mis",
        {"beta": 0.3},
        [0.147547, 0.705177, 1.199752, 1.502083, 0.246636]
        + [-0.054381, -0.227913, -1.151024, 0.085208],
    ),
    (  # TRL, off_policy_mask_threshold
        "sequence_mask",
        {"beta": 0.3, "max_drift": 0.03},
        [0.147547, 0.993187, 1.608458, 0.552585, 0.246636]
        + [-0.054381, 0.104958, -0.151024, -6.555026],
    ),
    (
        "sequence_mask",
        {"beta": 0.3, "max_drift": 0.05},
        [0.147547, 0.993187, 1.608458, 0.552585, 0.246636]
        + [-0.054381, -1.116445, -3.820321, -6.555026],
    ),
    (  # verl, the vanilla loss with bounds of 9 and minus its k1 as the advantage
        "opd",
        {"beta": 0, "clip_low": 9.0, "clip_high": 9.0},
        [0.944901, -0.592655, 0.157691, 0.110517, 1.813593]
        + [-0.370409, 0.610701, 2.201578, 4.814169],
    ),
    (  # TRL, loss_type dapo: of a token of 9, not of 1/|o_i| of 4 answers
        "token_mean",
        {"beta": 0},
        [0, 1.111227, 1.576907, 0.552585, 0, 0, -1.221403, -3.669297, -6.640234],
    ),
]


class Table(torch.nn.Module):
    """A policy of which only the log π of the answers above is known."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.logprobs = torch.nn.Parameter((OLD + LOG_R).double())


@pytest.mark.parametrize("name,flags,expected", SOURCES)
def test_a_token_is_pushed_as_in_the_source(name, flags, expected, made, monkeypatch):
    module, model = made([name]), Table()
    args = module.Args(micro_batch_size=3, max_grad_norm=1e9, **flags)
    mask = (torch.arange(3) < torch.tensor(COUNTS)[:, None]).double()
    batch = {"mask": mask, "row": torch.arange(4), "old_logprobs": OLD.double()}
    batch |= {
        "sampled_logprobs": (OLD - LOG_W).double(),
        "ref_logprobs": (OLD + LOG_R + D).double(),
    }
    batch["advantages"] = (TEACHER_A if name == "opd" else ADVANTAGES).double()
    monkeypatch.setattr(module, "token_logprobs", lambda m, part, _: m.logprobs[part["row"]])
    module.train_minibatch(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, args)
    share = torch.tensor(COUNTS)[:, None] * 4 if name != "token_mean" else 9
    found = -(model.logprobs.grad * share)[mask > 0]
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------------- Credit

# Block, flags, rewards, lengths, and the advantages that the source gives them.
REWARDS = [[1, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 1]]
TOKENS = [[2, 6, 3, 7], [5, 4, 8, 2], [3, 3, 2, 4]]
WHITE = [1.860498, -1.056763, 1.860498, -1.056763, *[-0.327448] * 3, 2.589813, *[0.401868] * 4]
HALF, MOST = [[1.0] * 4 + [0.0] * 4], [[1.0] * 5 + [0.0] * 3]
CREDIT = [
    # OpenRLHF 3c3be62, experience_maker.py, reinforce_baseline
    ("reinforce_pp", {}, REWARDS, TOKENS, WHITE),
    ("reinforce_pp", {}, [[1.0, 0.0]], [[2, 6]], [1.732051, -0.57735]),
    # tajwarfahim/maxrl c0698eb, core_algos.py; prime-rl's max_rl.py gives the same
    ("maxrl", {}, REWARDS, TOKENS, [1, -1, 1, -1, -1, -1, -1, 3, 0, 0, 0, 0]),
    # RUCAIBox/Passk_Training c3ba575, passk_adv.py
    ("pass_at_k", {"pass_k": 3}, HALF, [[1] * 8], [0.277349] * 4 + [-0.277349] * 4),
    ("pass_at_k", {"pass_k": 3}, [[1.0] + [0.0] * 7], [[1] * 8], [1.290992] + [-0.184427] * 7),
    ("pass_at_k", {}, [[1.0] * 2 + [0.0] * 6], [[1] * 8], [0.522232] * 2 + [-0.174077] * 6),
    ("pass_at_k", {}, MOST, [[1] * 8], [0.0] * 8),
]


def one_step(module, patch, args, lengths, rewards, old=None):
    """The minibatches of a train_step whose rollout has these lengths and rewards."""
    mask = (torch.arange(8) < torch.tensor(lengths).view(-1, 1)).double()
    logprobs = -mask if old is None else old
    batch = {"mask": mask, "sampled_logprobs": logprobs, "ended": torch.ones(len(mask)) > 0}
    rollout = (batch, None, torch.tensor(rewards).double())
    patch.setattr(module, "next_problems", lambda train, step, args: None)
    patch.setattr(module, "rollout", lambda model, *_: rollout)
    patch.setattr(module, "batch_logprobs", lambda model, batch, args: logprobs * (model or 1))
    seen = []
    patch.setattr(module, "train_minibatch", lambda model, _, part, args: seen.append(part) or {})
    patch.setattr(module, "global_means", lambda records, device: records[0])
    record = module.train_step(Nothing(), 3, None, None, None, 1, args)
    return seen, record


class Nothing(int):
    """In place of a model that is never asked."""

    device = torch.device("cpu")


@pytest.mark.parametrize("name,flags,rewards,lengths,expected", CREDIT)
def test_credit_is_that_of_the_source(name, flags, rewards, lengths, expected, made, monkeypatch):
    module = made([name])
    args = module.Args(**{"beta": 0, "minibatches": 1, "prompts_per_step": 1} | flags)
    monkeypatch.setattr(torch, "randperm", torch.arange)
    (batch,), _ = one_step(module, monkeypatch, args, lengths, rewards)
    expected = torch.tensor(expected).double()
    torch.testing.assert_close(batch["advantages"], expected, rtol=1e-3, atol=1e-5)


def test_reinforce_pp_counts_the_tokens_of_all_processes(made, monkeypatch):
    """Here of two processes that hold the same."""
    module = made(["reinforce_pp"])
    args = module.Args(beta=0, minibatches=1, prompts_per_step=1)
    monkeypatch.setattr(torch, "randperm", torch.arange)
    monkeypatch.setattr(module, "sum_over_processes", lambda tensor: 2 * tensor)
    (batch,), _ = one_step(module, monkeypatch, args, TOKENS, REWARDS)
    torch.testing.assert_close(batch["advantages"], torch.tensor(WHITE).double(), rtol=1e-5, atol=0)


def mean_of_gradient(module, args, p, size):
    """Of 1/G Σ_i A_i d log π(o_i) / dp over all groups of answers that are right with p."""
    total = 0.0
    for right in itertools.product([0.0, 1.0], repeat=size):
        chance = math.prod(p if r else 1 - p for r in right)
        advantages = module.compute_advantages(torch.tensor([right]).double(), args)[0]
        slopes = torch.tensor([1 / p if r else -1 / (1 - p) for r in right]).double()
        total += chance * (advantages * slopes).mean().item()
    return total


@pytest.mark.parametrize("p,k,size", [(0.1, 3, 5), (0.3, 2, 6), (0.8, 4, 6), (0.5, 1, 4)])
def test_without_the_std_pass_at_k_s_mean_is_exactly_the_gradient_of_pass_at_k(p, k, size, made):
    module = made(["pass_at_k"])
    args = module.Args(pass_k=k, scale_rewards=False)
    gradient = k * (1 - p) ** (k - 1)  # of 1 − (1 − p)^k
    assert mean_of_gradient(module, args, p, size) == pytest.approx((1 / k - 1 / size) * gradient)
    assert mean_of_gradient(module, module.Args(pass_k=size, scale_rewards=False), p, size) == 0


@pytest.mark.parametrize("p,size", [(0.1, 4), (0.4, 6), (0.9, 5)])
def test_maxrl_s_mean_is_the_gradient_of_the_first_terms_of_log_p(p, size, made):
    module = made(["maxrl"])
    gradient = sum((1 - p) ** n for n in range(size - 1))
    found = mean_of_gradient(module, module.Args(), p, size)
    assert found == pytest.approx(gradient, rel=1e-3)


# --------------------------------------------------------------- Teacher, entropy, stale, machines


def test_opd_s_credit_is_the_teacher_s_log_prob_minus_pi_old_s(made, monkeypatch):
    module = made(["opd"])
    args = module.Args(beta=0, minibatches=1, prompts_per_step=1)
    monkeypatch.setattr(torch, "randperm", torch.arange)
    old = -torch.rand(12, 8).double() * (torch.arange(8) < torch.tensor(TOKENS).view(-1, 1))
    (batch,), record = one_step(module, monkeypatch, args, TOKENS, REWARDS, old)
    torch.testing.assert_close(batch["advantages"], 2 * old)  # the teacher's are 3 times as large
    torch.testing.assert_close(record["kl"].mean(), -2 * old[batch["mask"] > 0].mean())


@pytest.mark.slow
def test_opd_is_drawn_to_its_teacher(made, short_run):
    """Which is the tiny model with a head of its own; without a teacher it asks for one."""
    module = made(["opd"])
    folder = short_run["output_dir"] + "/teacher"
    teacher, _ = module.load_policy(module.Args(), "cpu")
    torch.manual_seed(0)
    torch.nn.init.normal_(teacher.get_output_embeddings().weight, std=0.2)
    teacher.save_pretrained(folder)
    flags = short_run | {"beta": 0, "steps": 30, "learning_rate": 2e-3, "warmup_steps": 1}
    with pytest.MonkeyPatch.context() as patch:
        steps = calls_of(patch, module, "train_step")
        module.main(module.Args(**flags, teacher=folder))
    kls = [record["kl"] for _, record in steps]
    assert sum(kls[-5:]) < 0.5 * sum(kls[:5])
    assert refused(module.main, module.Args(**short_run)).startswith("--teacher: name")


# Skywork-OR1 64e96af, EntController with a target of 0.2: entropy of a rollout, and its weight then
CONTROLLED = [(0.3, 0.0), (0.1, 0.005), (0.15, 0.01), (0.05, 0.015), (0.25, 0.01), (0.1, 0.015)]


def test_the_entropy_s_weight_is_controlled_as_in_the_source(made, monkeypatch):
    """And the bonus rests while the entropy is above the target."""
    module = made(["entropy"])
    args = module.Args(beta=0, minibatches=1, prompts_per_step=1, entropy_target=0.2)
    for entropy, after_it in CONTROLLED:
        record = {"entropy": torch.tensor([entropy - 0.01, entropy + 0.01])}
        monkeypatch.setattr(module, "rollout_metrics", lambda *_, record=record: record)
        before = args.entropy_weight
        (batch,), logged = one_step(module, monkeypatch, args, TOKENS, REWARDS)
        assert args.entropy_weight == pytest.approx(after_it)
        assert set(batch["bonus"].tolist()) == {before if entropy <= 0.2 else 0.0}
        assert logged["entropy_weight"] == before


@pytest.mark.parametrize("names", ["entropy", "entropy tis", "tis entropy", "mis entropy"])
def test_the_entropy_bonus_has_the_gradient_of_the_entropy(names, made):
    """And no weight for the sampler changes it, whichever of the two is applied first."""
    module, model = made(names.split()), random_model("gpt2").double()
    args = module.Args(beta=0, micro_batch_size=5, max_grad_norm=1e9)
    batch, gradients = batch_of(model, PROMPTS, LENGTHS), []
    batch["advantages"] = torch.tensor([1.0, -1.0] * 6)
    batch["sampled_logprobs"] = batch["old_logprobs"] - 0.1 * batch["mask"]
    for bonus in (0.0, 0.7):
        batch["bonus"] = torch.full((12,), bonus)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        module.train_minibatch(model, optimizer, batch, args)
        gradients.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))
    total = 0.0
    for _, logits in single_rows(model, batch):
        total += torch.distributions.Categorical(logits=logits).entropy().mean() / 12
    expected = torch.autograd.grad(total, list(model.parameters()))
    expected = torch.cat([each.flatten() for each in expected])
    torch.testing.assert_close(gradients[0] - gradients[1], 0.7 * expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stale", [0, 2])
def test_stale_rollouts_are_drawn_by_the_model_of_so_many_steps_ago(stale, made, short_run):
    """And the run goes on, however far π_old is from π_s."""
    with pytest.MonkeyPatch.context() as patch:
        module, weights, drawn = made(["stale"]), [], []
        module.SAMPLERS.clear()
        step, rollout = module.train_step, module.rollout

        def watched_step(model, *rest):
            weights.append(copy.deepcopy(model.state_dict()))
            drawn.clear()
            metrics = step(model, *rest)
            expected = weights[max(0, len(weights) - 1 - stale)]
            assert all(torch.equal(drawn[0][key], expected[key]) for key in expected)
            return metrics | {"sampling/sampling_logp_difference/mean": 1.0}

        def watched_rollout(model, *rest):
            drawn.append(copy.deepcopy(model.state_dict()))
            return rollout(model, *rest)

        patch.setattr(module, "train_step", watched_step)
        patch.setattr(module, "rollout", watched_rollout)
        module.main(module.Args(**short_run | {"steps": 5, "stale": stale}))
    assert len(weights) == 5 and len(module.SAMPLERS) == stale + 1


def test_bf16_rounds_the_passes_and_not_the_weights(made):
    module, model = made(["bf16"]), random_model("llama")
    batch = batch_of(model, PROMPTS, LENGTHS)
    logprobs = module.token_logprobs(model, batch, 1.0)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    seen = torch.cat([batch["prompt_mask"], batch["mask"].long()], 1)
    places = (seen.cumsum(1) - 1).clamp(min=0)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids, attention_mask=seen, position_ids=places).logits
    width = batch["mask"].shape[1]
    rounded = logits[:, -width - 1 : -1].float().log_softmax(-1)
    rounded = rounded.gather(2, batch["completion_ids"][:, :, None])[:, :, 0] * batch["mask"]
    gap, step = (logprobs - rounded).abs().mean(), (rounded - batch["old_logprobs"]).abs().mean()
    assert gap < step / 2, "not the rounding of a plain pass in bf16"
    assert logprobs.dtype == torch.float32
    assert (logprobs - batch["old_logprobs"]).abs().max() > 1e-4, "nothing was rounded"
    logprobs.sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_checkpointing_reads_each_layer_twice_and_gives_grpo_s_gradient(made):
    """Without dropout, and the sampler's cache works as before."""
    gradients, counts = [], []
    for module in (script("grpo_llm"), made(["checkpointing"])):
        model = random_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5).double()
        if counts:
            model.activation_checkpointing_enable()
        batch = batch_of(model, PROMPTS, LENGTHS)
        batch["advantages"] = torch.tensor([1.0, -1.0] * 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with pytest.MonkeyPatch.context() as patch:
            calls = calls_of(patch, model.transformer.h[1].ln_1, "forward")
            module.train_minibatch(model, optimizer, batch, module.Args(beta=0))
            counts.append(len(calls))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert not any(part.training for part in model.modules())
    assert counts == [1, 2]
    torch.testing.assert_close(*gradients)
    assert module.generate(model.float(), PROMPTS, 4, 8, 1.0)["mask"].sum() > 12


# ------------------------------------------------------------------------ The scripts and the page


def test_blocks_of_engineering_fit_all_five_and_others_say_where_they_do_not():
    for names, parent in ALONE + TOGETHER:
        compile(after.applied(*names, script=parent), parent, "exec")
    with pytest.raises(SystemExit) as caught:
        after.applied("tis", "sapo", script="cispo_llm")
    told = str(caught.value)
    assert told.startswith("sapo does not fit cispo_llm.py with tis: its hunk 1, in class Args:")
    assert "\n    clip_low: float = 0.2  # ε_low" in told
    with pytest.raises(
        SystemExit, match="dual_clip does not fit grpo_llm.py with sapo: its hunk 2"
    ):
        after.applied("sapo", "dual_clip")


def accepted(names, parent="grpo_llm"):
    try:
        return after.applied(*names, script=parent)
    except SystemExit:
        return None


def test_each_pair_that_is_accepted_compiles_in_either_order_and_has_a_run(
    made, monkeypatch, capsys
):
    monkeypatch.setattr(after, "ROOT", Path(made(["tis"]).__file__).parent)
    for pair in itertools.combinations(after.BLOCKS, 2):
        texts = [accepted(names) for names in (pair, pair[::-1])]
        assert (texts[0] is None) == (texts[1] is None), pair
        if texts[0] is None:
            continue
        lines = [sorted(text.splitlines()[1:]) for text in texts]
        assert lines[0] == lines[1], pair
        for names, text in zip((pair, pair[::-1]), texts, strict=True):
            compile(text, " ".join(names), "exec")
            after.main([*names])
            *_, command = capsys.readouterr().out.splitlines()
            for flag in re.findall(r" --(\S+) \S+", command):
                assert f"\n    {flag.replace('-', '_')}: " in text, command


SENSELESS = [(a, b) for left, right, _ in after.APART for a in left.split() for b in right.split()]
DEAD = [("opd", name) for name in ("reinforce_pp", "maxrl", "pass_at_k")]


def test_the_page_names_combinations_that_crash_or_mean_something_else():
    crashes, shared = {("opd", "sequence_mask")}, {"opd", "tis", "icepop"}
    assert crashes | {*itertools.product(shared, ["gspo_llm", "gmpo"])} <= {*SENSELESS}
    twice = {*itertools.product(["tis", "icepop", "mis"], repeat=2)}
    assert twice | {("opd", "unbiased_kl"), ("dapo_llm", "maxrl")} <= {*SENSELESS}


@pytest.mark.parametrize("pair", SENSELESS + DEAD, ids=" ".join)
def test_what_fits_and_makes_no_sense_is_refused_in_a_line(pair, monkeypatch):
    assert {*pair} <= {*after.BLOCKS, *FIVE}
    for names in (pair, pair[::-1]):
        parent = next((name for name in names if name in FIVE), "grpo_llm")
        names = [name for name in names if name in after.BLOCKS]
        line = refused(lambda names=names, parent=parent: after.applied(*names, script=parent))
        assert re.match(r"(\w+) and (\w+) make no sense together: .", line), line
    monkeypatch.setattr(after, "APART", [])
    assert accepted(names, parent) or pair in DEAD  # else the page would not need the row


def test_a_script_knows_the_blocks_that_it_has(made, monkeypatch):
    for names, parent in ((["bf16"], "gspo_llm"), (["tis"], "grpo_llm"), (["stale"], "grpo_llm")):
        folder = Path(made(names, parent).__file__).parent
    monkeypatch.setattr(after, "ROOT", folder)
    assert "opd and gspo_llm make" in refused(after.main, ["after_gspo_llm_bf16", "opd"])
    assert "tis and icepop make" in refused(after.main, ["after_tis.py", "icepop"])
    text = accepted(["tis", "entropy"], "after_stale")
    assert text.splitlines()[0].startswith("# grpo_llm.py with stale and tis and entropy of tests/")
    assert text == accepted(["stale", "tis", "entropy"])


def test_a_copy_of_one_s_own_is_not_overwritten(made, monkeypatch):
    path = Path(made(["tis"]).__file__)
    monkeypatch.setattr(after, "ROOT", path.parent)
    path.write_text((ROOT / "grpo_llm.py").read_text())
    assert refused(after.main, ["tis"]).startswith("after_tis.py is a script of your own")
    assert path.read_text() == (ROOT / "grpo_llm.py").read_text()
    path.unlink()


def test_a_run_of_blocks_together_has_the_flags_of_each(made, capsys, monkeypatch):
    monkeypatch.setattr(after, "ROOT", Path(made(["tis"]).__file__).parent)
    after.main(["gspo_llm", "stale", "maxrl"])
    command = "python after_gspo_llm_stale_maxrl.py --steps 40 --stale 16 --group-size 32"
    assert capsys.readouterr().out.splitlines()[-1].startswith(command)
    after.main(["tis"])
    assert capsys.readouterr().out.splitlines()[-1] == "python after_tis.py --steps 40"
    after.main(["opd", "bf16"])
    assert " --teacher runs/grpo_llm__1__" in capsys.readouterr().out.splitlines()[-1]


def test_the_correction_of_one_s_own_leaves_out_unlikely_tokens(made, monkeypatch):
    """The page's three lines: the first is grpo_llm.py's, and two come below it."""
    code = re.search(r"^( +objective, clipped = .+\n)(.+\n.+\n)\n", after.PAGE, re.M)
    there, mine = (re.sub(r" +#.*", "", lines) for lines in code.groups())
    there, *mine = ["        " + line.strip() + "\n" for line in (there + mine).splitlines()]
    hunk = f"@@ def train_minibatch(\n {there}+{'+'.join(mine)}"
    monkeypatch.setitem(after.BLOCKS, "unlikely", f"--- grpo_llm.py\n+++ x\n{hunk}")
    module, model = made(["unlikely"]), Table()
    mask = (torch.arange(3) < torch.tensor(COUNTS)[:, None]).double()
    sampled = OLD.double()
    sampled[0, 2], sampled[3, 0] = math.log(0.0009), math.log(0.0011)
    batch = {"mask": mask, "row": torch.arange(4), "old_logprobs": OLD.double()}
    batch |= {"sampled_logprobs": sampled, "advantages": ADVANTAGES.double()}
    monkeypatch.setattr(module, "token_logprobs", lambda m, part, _: m.logprobs[part["row"]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    module.train_minibatch(model, optimizer, batch, module.Args(beta=0, max_grad_norm=1e9))
    gradient = model.logprobs.grad
    assert gradient[0, 2] == 0 and gradient[0, 1] != 0 and gradient[3, 0] != 0


def test_a_block_changes_only_lines_that_stand_there_once(monkeypatch):
    twice = "--- grpo_llm.py\n+++ after_mine.py\n@@ imports\n-import torch\n+import torch  # mine\n"
    monkeypatch.setitem(after.BLOCKS, "once", twice)
    monkeypatch.setitem(after.BLOCKS, "twice", twice.replace("import torch", "    if RANK > 0:"))
    assert "\nimport torch  # mine\n" in after.applied("once")
    with pytest.raises(SystemExit, match="which are not there, or not once"):
        after.applied("twice")


@pytest.mark.parametrize("name", after.BLOCKS)
def test_the_block_printed_of_a_script_makes_that_script(name, made, monkeypatch):
    module = made([name])
    monkeypatch.setattr(after, "ROOT", Path(module.__file__).parent)
    monkeypatch.setitem(after.BLOCKS, name, after.block(module.__name__) + "\n")
    assert after.applied(name) == Path(module.__file__).read_text()


def test_a_block_can_be_printed_beside_another_parent(made, monkeypatch, capsys):
    module = made(["dual_clip"], "dapo_llm")
    monkeypatch.setattr(after, "ROOT", Path(module.__file__).parent)
    after.main(["--block", f"{module.__name__}.py", "dapo_llm"])
    monkeypatch.setitem(after.BLOCKS, "dual_clip", capsys.readouterr().out)
    assert len(after.BLOCKS["dual_clip"].splitlines()) < 20
    assert after.applied("dual_clip", script="dapo_llm") == Path(module.__file__).read_text()
    for names in (["nonsense"], ["dapo_llm", "nonsense"]):
        assert refused(after.main, ["--block", *names]).startswith(
            "--block: there is no nonsense.py"
        )


@pytest.mark.parametrize("name", after.BLOCKS)
def test_the_run_to_try_is_printed_and_has_flags_of_its_script(name, made, capsys, monkeypatch):
    module = made([name])
    monkeypatch.setattr(after, "ROOT", Path(module.__file__).parent)
    after.main([name])
    *_, command = capsys.readouterr().out.splitlines()
    assert f"after_{name}.py" in command.split()
    tyro.cli(module.Args, args=command.split()[2:])
    for names, command in re.findall(
        r"`python tests/learn/after.py (.+?)`, then `(.+?)`", after.PAGE
    ):
        module = made(names.split())
        assert command.split()[1] == f"{module.__name__}.py"
        tyro.cli(module.Args, args=command.split()[2:])


def test_a_script_is_named_after_its_blocks_and_its_parent(made):
    assert made(["dppo", "icepop"]).__name__ == "after_dppo_icepop"
    assert made(["bf16"], "gspo_llm").__name__ == "after_gspo_llm_bf16"
    for unknown in ([], ["gspo_llm"], ["dppo", "nothing"], ["nothing", "dppo"], ["--block"]):
        with pytest.raises(SystemExit, match="The blocks: opd reinforce_pp"):
            after.main(unknown)


@pytest.mark.slow
@pytest.mark.parametrize("names,parent", ALONE + TOGETHER)
def test_two_steps(names, parent, made, short_run):
    module = made(names, parent)
    teacher = {"teacher": str(ROOT / "tests/tiny_model")} if "opd" in names else {}
    result = module.main(module.Args(**short_run, **teacher))
    assert 0 <= result["eval/pass@1"] <= 1


def test_the_page_has_every_block_and_one_line_ignores_their_scripts():
    rows = re.findall(r"^\| \[(\w+)\]\(#(\S+)\) \| .+? \| (\d+) \| (.+) \|$", after.PAGE, re.M)
    assert [name for name, *_ in rows] == list(after.BLOCKS)
    titles = re.sub(r"[^\w\n #-]", "", after.PAGE.lower()).replace("-", " ")
    for name, anchor, count, others in rows:
        assert all(accepted([name], f"{other}_llm") for other in re.findall(r"\w+", others)), name
        fits = [parent for parent in FIVE if parent != "grpo_llm" and accepted([name], parent)]
        assert len(fits) == len(re.findall(r"\w+", others)), name
        lines = after.BLOCKS[name].split("\n@@", 1)[1]
        assert f"\n## {anchor.replace('-', ' ')}\n" in titles
        assert int(count) == len(re.findall("^[-+]", lines, re.M)), name
        assert f"\n`python tests/learn/after.py {name}`\n" in after.PAGE
        assert (
            f"**Try it.** `python after_{name}.py" in after.PAGE
            or f"stale {name}`" in after.PAGE
            or name == "opd"
        )
    assert "/after_*.py" in (ROOT / ".gitignore").read_text().split()
    table = after.PAGE.partition("## What the libraries do")[2].partition("\n## ")[0]
    for built in re.findall(r"^\| .+? \| (\w[\w ,>β]+) \| ", table, re.M)[1:]:
        after.applied(*(word for word in re.findall(r"\w+", built) if word in after.BLOCKS))
