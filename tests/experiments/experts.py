"""Token ratios of a mixture of experts: their variance, the part of routing, and GSPO's gain."""

import inspect
import math
import zlib
from unittest.mock import patch

import numpy as np
import torch
from bench import train
from harness import Panel, arms
from llm_parts import CACHE, imitate, keep, load, mean, started
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from verdicts import Contrast

import grpo_llm
import gspo_llm


class Adam(torch.optim.AdamW):
    """In place of Muon, which takes matrices alone: a mixture stacks those of its experts."""

    def step(self):
        self.param_groups[0]["lr"] /= 5  # imitate sets Muon's rate before each step
        super().step()


def warm_start(kind, start, steps):
    """The folder of a model that meanders: the tiny model's shape, or with 8 experts of half the
    width in each layer, of which a token is sent to 2."""
    key = zlib.crc32(
        (SHAPE + "".join(map(inspect.getsource, (warm_start, Adam, imitate)))).encode()
    )
    folder = CACHE / f"{kind}-{start}-{steps}-{key:08x}"
    if not folder.exists():
        model, tokenizer = load(grpo_llm.TINY_MODEL)
        shape = {name: getattr(model.config, name) for name in SHAPE.split()}
        torch.manual_seed(start)
        if kind == "dense":
            model = LlamaForCausalLM(model.config)
        else:
            experts = {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2}
            experts |= {"output_router_logits": True, "router_aux_loss_coef": 0.01}
            model = MixtralForCausalLM(MixtralConfig(**shape, **experts, sliding_window=None))
        with patch.object(torch.optim, "Muon", lambda _, **options: Adam(model.parameters())):
            imitate(model, tokenizer, "meander", start, steps)
        model.config.output_router_logits = False  # the loss that spreads tokens is not used again
        keep(model, tokenizer, folder)
    return folder


def routed(model, batch, given=None):
    """Log π of the batch's tokens, and the experts that each token was sent to, layer by layer; or
    the log π if every token is sent to the experts given."""
    seen = []

    def forward(self, hidden, own=MixtralTopKRouter.forward):
        logits, scores, chosen = own(self, hidden)
        if given:
            chosen = given[len(seen)]
            scores = logits.softmax(-1).gather(1, chosen)
            scores = scores / scores.sum(1, keepdim=True)
        seen.append(chosen)
        return logits, scores, chosen

    with torch.no_grad(), patch.object(MixtralTopKRouter, "forward", forward):
        return grpo_llm.token_logprobs(model, batch, 1.0), seen


def learn(script, folder, seed, steps, epochs):
    """The reward by rollout, and of each rollout the ratios' variance at its end: as it is, and
    with each token sent to its old experts."""
    args = script.Args(beta=0.0, update_epochs=epochs, seed=seed, steps=steps, max_new_tokens=32)
    found = {"variance": [], "replayed": [], "kl": [], "rerouted": []}
    old = {}

    def rollout(model, *rest, own=script.rollout):
        batch, completions, rewards = own(model, *rest)
        old.update(batch=batch, routes=routed(model, batch)[1])
        return batch, completions, rewards

    def look(step, model, metrics):
        batch, routes = old["batch"], old["routes"]
        tokens = batch["mask"] > 0
        logprobs, now = routed(model, batch)
        log_ratio = (logprobs - batch["old_logprobs"])[tokens]
        found["variance"].append(log_ratio.exp().var().item())
        found["kl"].append((log_ratio.exp() - 1 - log_ratio).mean().item())
        if routes:
            logprobs, _ = routed(model, batch, routes)
            found["replayed"].append((logprobs - batch["old_logprobs"])[tokens].exp().var().item())
            answers = tokens[:, :-1].flatten()  # what token_logprobs feeds, but for the questions
            pairs = [each for each in zip(routes, now, strict=True) if len(each[0]) == len(answers)]
            moved = [(a.sort(1)[0] != b.sort(1)[0]).any(1)[answers].float() for a, b in pairs]
            found["rerouted"].append(mean([each.mean().item() for each in moved]))

    with patch.object(script, "rollout", rollout):
        found["reward"] = train(script, args, steps, each_step=look, folder=folder)["reward"]
    return found


def run(kind, seed, start, steps=30, epochs=4, warm=500):
    """GRPO, looked into, and then GSPO, of the same seed. The variances are log10 of them."""
    folder = warm_start(kind, start, warm)
    grpo = learn(grpo_llm, folder, seed, steps, epochs)
    gspo = learn(gspo_llm, folder, seed, steps, epochs)
    result = {name: mean(map(math.log10, grpo[name])) for name in LOGGED if grpo[name]}
    result |= {name: mean(grpo[name]) for name in ("kl", "rerouted") if grpo[name]}
    result |= {"GRPO": mean(grpo["reward"]), "GSPO": mean(gspo["reward"])}
    result |= {"gain": result["GSPO"] - result["GRPO"], "reward": grpo["reward"]}
    return result | {"reward of GSPO": gspo["reward"]}


def contrast(name, column, smallest):
    more, less = arms(column, "kind", ["mixture", "dense"]).values()
    return Contrast(f"{name}: mixture − dense", more, less, smallest, block="start")


LOGGED = ("variance", "replayed")
SHAPE = "hidden_size num_attention_heads num_hidden_layers num_key_value_heads vocab_size "
SHAPE += "initializer_range rms_norm_eps rope_parameters bos_token_id eos_token_id pad_token_id"
CLAIM = (
    "In a mixture of experts the ratios of tokens vary more, because tokens change experts, and "
    "GSPO gains more."
)
JOBS = started(16, kind=["dense", "mixture"])
SMOKE = started(1, kind=["dense", "mixture"], steps=[2], epochs=[1], warm=[2])
SECONDS = 50
MIXTURE = {"kind": "mixture"}
PRIMARIES = [
    [  # more: twice as much; because: without the changes of experts a fifth of it is gone
        contrast("log10 of the variance", "variance", 0.3),
        Contrast(
            "log10 of the variance: mixture − with its old experts",
            (MIXTURE, "variance"),
            (MIXTURE, "replayed"),
            0.1,
            paired=True,  # the same samples and policy
        ),
    ],
    [contrast("reward, GSPO − GRPO", "gain", 0.03)],
]

# The page
LESSON = (
    "no difference",
    "In a small mixture of experts token ratios vary hardly more than in a dense model. Changes of "
    "experts make up this difference, but it is small, and GSPO gains no more than in the dense "
    "model. In both models it is behind GRPO.",
)
AXES, ROLLOUTS = ("rollouts", "reward"), list(range(1, 31))
PANELS = [
    Panel("Variance of the ratio", arms("variance", "kind", ["dense", "mixture"]), ("log10", "")),
    *(
        Panel(
            kind, {"GRPO": (wanted, "reward"), "GSPO": (wanted, "reward of GSPO")}, AXES, ROLLOUTS
        )
        for kind, wanted in (("Dense", {"kind": "dense"}), ("Mixture", MIXTURE))
    ),
]


def words(runs):
    def times(kind, column="variance"):
        return f"{10 ** np.mean(runs.find({'kind': kind}, column)):.3f}"

    def learned(kind):
        said = [runs.mean(method, ".3f", kind=kind) for method in ("GRPO", "GSPO")]
        return f"{said[0]} with GRPO and {said[1]} with GSPO"

    return f"""
    A tiny Mixtral sends each token to 2 of 8 experts in each of its two layers. The dense model has
    the same shape and computes as much for a token. After the four epochs of a rollout of GRPO the
    variance of the ratios is {times("mixture")} in the mixture and {times("dense")} in the dense
    model (geometric means over the rollouts); the KL from the old policy is
    {runs.mean("kl", ".3f", kind="mixture")} and {runs.mean("kl", ".3f", kind="dense")}, so a part
    of the difference is a longer step. In each layer {runs.mean("rerouted", ".0%", kind="mixture")}
    of the tokens go to other experts than before. If all are sent to their old experts, at the same
    weights, the variance is {times("mixture", "replayed")}. The mean reward over training is
    {learned("mixture")} in the mixture, and in the dense model it is {learned("dense")}."""


NOT_TRIED = "more layers and experts, bfloat16, and a rollout engine that routes in its own way."
